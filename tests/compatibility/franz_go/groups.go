package main

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// A consumer in a group, polled by a goroutine.
type member struct {
	client   *kgo.Client
	topic    string
	mutex    sync.Mutex
	assigned []int32
	got      [][2]int64
	ended    chan struct{}
}

func (a *adapter) join(r request) error {
	one := &member{topic: r.Topic, ended: make(chan struct{})}
	balancer := map[string]kgo.GroupBalancer{
		"range": kgo.RangeBalancer(), "roundrobin": kgo.RoundRobinBalancer(), "cooperative": kgo.CooperativeStickyBalancer(),
	}[r.Strategy]
	client, err := a.connect(
		kgo.ConsumerGroup(r.Group),
		kgo.ConsumeTopics(r.Topic),
		kgo.Balancers(balancer),
		kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(10*time.Second),
		kgo.HeartbeatInterval(200*time.Millisecond),
		kgo.OnPartitionsAssigned(one.gained),
		kgo.OnPartitionsRevoked(one.lost),
		kgo.OnPartitionsLost(one.lost),
	)
	if err != nil {
		return err
	}
	one.client = client
	a.members[r.Member] = one
	go one.run()
	return nil
}

func (m *member) gained(_ context.Context, _ *kgo.Client, topics map[string][]int32) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.assigned = append(m.assigned, topics[m.topic]...)
	slices.Sort(m.assigned)
}

func (m *member) lost(_ context.Context, _ *kgo.Client, topics map[string][]int32) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.assigned = slices.DeleteFunc(m.assigned, func(index int32) bool { return slices.Contains(topics[m.topic], index) })
}

func (m *member) run() {
	defer close(m.ended)
	for {
		fetches := m.client.PollFetches(context.Background())
		if fetches.IsClientClosed() {
			return
		}
		m.mutex.Lock()
		fetches.EachRecord(func(one *kgo.Record) {
			m.got = append(m.got, [2]int64{int64(one.Partition), one.Offset})
		})
		m.mutex.Unlock()
	}
}

func (m *member) state() any {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return map[string]any{
		"assigned": append([]int32{}, m.assigned...), "got": append([][2]int64{}, m.got...),
	}
}

func (m *member) leave() {
	m.client.Close()
	<-m.ended
}
