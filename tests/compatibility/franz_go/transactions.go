package main

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Two partitions, and one record in each of them.
func send(ctx context.Context, client *kgo.Client, value string) error {
	var records []*kgo.Record
	for partition := range int32(2) {
		records = append(records, &kgo.Record{Partition: partition, Value: fmt.Appendf(nil, "%s-%d", value, partition)})
	}
	return client.ProduceSync(ctx, records...).FirstErr()
}

// Transactions one after the other; every second one is aborted. Returns the error of a producer that another one has
// fenced.
func (a *adapter) transact(ctx context.Context, r request) (any, error) {
	connect := func() (*kgo.Client, error) {
		return a.connect(
			kgo.TransactionalID(r.Topic),
			kgo.RecordPartitioner(kgo.ManualPartitioner()),
			kgo.DefaultProduceTopic(r.Topic),
			kgo.ProducerLinger(0),
		)
	}
	old, err := connect()
	if err != nil {
		return nil, err
	}
	defer old.CloseAllowingRebalance()
	if _, _, err := old.ProducerID(ctx); err != nil {
		return nil, err
	}
	client, err := connect()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	for round := range r.Rounds {
		if err := client.BeginTransaction(); err != nil {
			return nil, err
		}
		if err := send(ctx, client, fmt.Sprint(round)); err != nil {
			return nil, err
		}
		if err := client.EndTransaction(ctx, kgo.TransactionEndTry(round%2 == 0)); err != nil {
			return nil, err
		}
	}
	if err := old.BeginTransaction(); err != nil {
		return err.Error(), nil
	}
	if err := send(ctx, old, "fenced"); err != nil {
		return err.Error(), nil
	}
	return "not fenced", nil
}

// Copies the records of one topic to another, each poll in a transaction with the group's offsets; every second
// transaction is aborted, upon which the session goes back to what was committed.
func (a *adapter) copy(ctx context.Context, r request) (any, error) {
	session, err := kgo.NewGroupTransactSession(
		kgo.SeedBrokers(a.seeds...),
		kgo.ClientID("franz-go"),
		kgo.TransactionalID(r.Group),
		kgo.ConsumerGroup(r.Group),
		kgo.ConsumeTopics(r.Name),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DefaultProduceTopic(r.Topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.RequireStableFetchOffsets(),
	)
	if err != nil {
		return nil, err
	}
	defer session.Close()
	copied := 0
	for round := 0; copied < r.Count; round++ {
		fetches := session.PollRecords(ctx, 3)
		if err := fetches.Err(); err != nil {
			return nil, err
		}
		if err := session.Begin(); err != nil {
			return nil, err
		}
		var records []*kgo.Record
		fetches.EachRecord(func(one *kgo.Record) {
			records = append(records, &kgo.Record{Partition: one.Partition, Value: one.Value})
		})
		if err := session.ProduceSync(ctx, records...).FirstErr(); err != nil {
			return nil, err
		}
		committed, err := session.End(ctx, kgo.TransactionEndTry(round%2 == 1))
		if err != nil {
			return nil, err
		}
		if committed {
			copied += len(records)
		}
	}
	return copied, nil
}
