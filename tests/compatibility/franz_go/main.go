// franz-go for the client matrix: requests as JSON lines, as tests/compatibility/clients/speaking.py describes them.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sort"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const wait = 30 * time.Second

// A record on its way in or out. Go writes []byte as base64, and nil as null.
type record struct {
	Partition int32    `json:"partition"`
	Offset    int64    `json:"offset"`
	Timestamp int64    `json:"timestamp"`
	Key       []byte   `json:"key"`
	Value     []byte   `json:"value"`
	Headers   [][2]any `json:"headers"`
}

// Every argument any request has.
type request struct {
	Do         string
	Topic      string
	Partitions int32
	Count      int
	Codec      string
	Acks       string
	Idempotent bool
	Records    []json.RawMessage
	Member     string
	Group      string
	Strategy   string
	Offsets    map[int32]int64
	Offset     int64
	Replicas   int16
	Configs    map[string]string
	Name       string
	Value      string
	Total      int
	Before     int64
	Rounds     int
}

type adapter struct {
	seeds   []string
	client  *kgo.Client
	admin   *kadm.Client
	members map[string]*member
}

func (a *adapter) connect(more ...kgo.Opt) (*kgo.Client, error) {
	options := []kgo.Opt{
		kgo.SeedBrokers(a.seeds...),
		kgo.ClientID("franz-go"),
		kgo.MetadataMinAge(50 * time.Millisecond),
		kgo.FetchMaxWait(200 * time.Millisecond),
	}
	return kgo.NewClient(append(options, more...)...)
}

func codecOf(name string) kgo.CompressionCodec {
	switch name {
	case "gzip":
		return kgo.GzipCompression()
	case "snappy":
		return kgo.SnappyCompression()
	case "lz4":
		return kgo.Lz4Compression()
	case "zstd":
		return kgo.ZstdCompression()
	}
	return kgo.NoCompression()
}

func decode(raw json.RawMessage) (*kgo.Record, error) {
	var one record
	if err := json.Unmarshal(raw, &one); err != nil {
		return nil, err
	}
	found := &kgo.Record{
		Key: one.Key, Value: one.Value, Partition: one.Partition, Timestamp: time.UnixMilli(one.Timestamp),
	}
	for _, pair := range one.Headers {
		header := kgo.RecordHeader{Key: pair[0].(string)}
		if text, is := pair[1].(string); is {
			if err := json.Unmarshal([]byte(`"`+text+`"`), &header.Value); err != nil {
				return nil, err
			}
		}
		found.Headers = append(found.Headers, header)
	}
	return found, nil
}

func encode(one *kgo.Record) record {
	headers := [][2]any{}
	for _, header := range one.Headers {
		headers = append(headers, [2]any{header.Key, header.Value})
	}
	return record{one.Partition, one.Offset, one.Timestamp.UnixMilli(), one.Key, one.Value, headers}
}

func (a *adapter) produce(ctx context.Context, r request) (any, error) {
	options := []kgo.Opt{
		kgo.ProducerBatchCompression(codecOf(r.Codec)),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.DefaultProduceTopic(r.Topic),
		kgo.ProducerLinger(time.Millisecond),
	}
	switch r.Acks {
	case "0":
		options = append(options, kgo.RequiredAcks(kgo.NoAck()))
	case "1":
		options = append(options, kgo.RequiredAcks(kgo.LeaderAck()))
	}
	if !r.Idempotent {
		options = append(options, kgo.DisableIdempotentWrite())
	}
	client, err := a.connect(options...)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	var records []*kgo.Record
	for _, raw := range r.Records {
		one, err := decode(raw)
		if err != nil {
			return nil, err
		}
		records = append(records, one)
	}
	offsets := []int64{}
	for _, done := range client.ProduceSync(ctx, records...) {
		if done.Err != nil {
			return nil, done.Err
		}
		offsets = append(offsets, done.Record.Offset)
	}
	return offsets, nil
}

func (a *adapter) read(ctx context.Context, r request) (any, error) {
	from := map[int32]kgo.Offset{}
	for index := range r.Partitions {
		from[index] = kgo.NewOffset().AtStart()
	}
	client, err := a.connect(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{r.Topic: from}))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	found := []record{}
	for len(found) < r.Count && ctx.Err() == nil {
		fetches := client.PollRecords(ctx, r.Count-len(found))
		if err := fetches.Err(); err != nil && ctx.Err() == nil {
			return nil, err
		}
		fetches.EachRecord(func(one *kgo.Record) { found = append(found, encode(one)) })
	}
	return found, nil
}

func (a *adapter) commit(ctx context.Context, r request) (any, error) {
	offsets := kadm.Offsets{}
	for index, offset := range r.Offsets {
		offsets.AddOffset(r.Topic, index, offset, -1)
	}
	answer, err := a.admin.CommitOffsets(ctx, r.Group, offsets)
	return nil, errors.Join(err, answer.Error())
}

func (a *adapter) offsetsOf(ctx context.Context, group string) (map[string]map[int32]int64, error) {
	answer, err := a.admin.FetchOffsets(ctx, group)
	found := map[string]map[int32]int64{}
	for topic, partitions := range answer {
		found[topic] = map[int32]int64{}
		for index, one := range partitions {
			found[topic][index] = one.At
		}
	}
	return found, errors.Join(err, answer.Error())
}

func main() {
	debug.SetGCPercent(400)
	a := &adapter{seeds: strings.Split(os.Args[1], ","), members: map[string]*member{}}
	client, err := a.connect()
	if err != nil {
		panic(err)
	}
	a.client, a.admin = client, kadm.NewClient(client)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			panic(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		ok, err := a.operation(ctx, r)
		cancel()
		answer := map[string]any{"ok": ok}
		if err != nil {
			answer = map[string]any{"failed": err.Error()}
		}
		line, err := json.Marshal(answer)
		if err != nil {
			panic(err)
		}
		fmt.Println(string(line))
	}
	for _, one := range a.members {
		one.leave()
	}
}

func (a *adapter) operation(ctx context.Context, r request) (any, error) {
	switch r.Do {
	case "version":
		return version(), nil
	case "produce":
		return a.produce(ctx, r)
	case "transact":
		return a.transact(ctx, r)
	case "copy":
		return a.copy(ctx, r)
	case "read":
		return a.read(ctx, r)
	case "join":
		return nil, a.join(r)
	case "member":
		return a.members[r.Member].state(), nil
	case "leave":
		a.members[r.Member].leave()
		delete(a.members, r.Member)
		return nil, nil
	case "commit":
		return a.commit(ctx, r)
	case "committed":
		found, err := a.offsetsOf(ctx, r.Group)
		return found[r.Topic], err
	}
	return a.administer(ctx, r)
}

func version() string {
	info, _ := debug.ReadBuildInfo()
	for _, module := range info.Deps {
		if module.Path == "github.com/twmb/franz-go" {
			return strings.TrimPrefix(module.Version, "v")
		}
	}
	return "unknown"
}

func names[T any](found map[string]T) []string {
	all := []string{}
	for name := range found {
		all = append(all, name)
	}
	sort.Strings(all)
	return all
}
