package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"
)

func (a *adapter) administer(ctx context.Context, r request) (any, error) {
	switch r.Do {
	case "create_topic":
		configs := map[string]*string{}
		for name, value := range r.Configs {
			configs[name] = &value
		}
		_, err := a.admin.CreateTopic(ctx, r.Partitions, r.Replicas, configs, r.Topic)
		return nil, err
	case "topics":
		found, err := a.admin.ListTopics(ctx)
		return found.Names(), err
	case "partitions":
		found, err := a.admin.ListTopics(ctx, r.Topic)
		return len(found[r.Topic].Partitions), errors.Join(err, found.Error())
	case "add_partitions":
		answer, err := a.admin.UpdatePartitions(ctx, r.Total, r.Topic)
		return nil, errors.Join(err, answer.Error())
	case "delete_topic":
		_, err := a.admin.DeleteTopic(ctx, r.Topic)
		return nil, err
	case "config":
		return a.config(ctx, r.Topic, r.Name)
	case "set_config":
		change := kadm.AlterConfig{Op: kadm.SetConfig, Name: r.Name, Value: &r.Value}
		answer, err := a.admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{change}, r.Topic)
		if err == nil {
			err = answer[0].Err
		}
		return nil, err
	case "brokers":
		found, err := a.admin.ListBrokers(ctx)
		return len(found), err
	case "start_offset":
		found, err := a.admin.ListStartOffsets(ctx, r.Topic)
		return found[r.Topic][0].Offset, errors.Join(err, found.Error())
	case "end_offset":
		found, err := a.admin.ListEndOffsets(ctx, r.Topic)
		return found[r.Topic][0].Offset, errors.Join(err, found.Error())
	case "delete_records":
		offsets := kadm.Offsets{}
		offsets.AddOffset(r.Topic, 0, r.Before, -1)
		answer, err := a.admin.DeleteRecords(ctx, offsets)
		return nil, errors.Join(err, answer.Error())
	}
	return a.administerGroups(ctx, r)
}

func (a *adapter) administerGroups(ctx context.Context, r request) (any, error) {
	switch r.Do {
	case "groups":
		found, err := a.admin.ListGroups(ctx)
		return names(found), err
	case "group":
		found, err := a.admin.DescribeGroups(ctx, r.Group)
		one := found[r.Group]
		return map[string]any{"state": one.State, "members": len(one.Members)}, errors.Join(err, one.Err)
	case "group_offsets":
		return a.offsetsOf(ctx, r.Group)
	case "set_group_offset":
		r.Offsets = map[int32]int64{0: r.Offset}
		return a.commit(ctx, r)
	case "delete_group":
		_, err := a.admin.DeleteGroup(ctx, r.Group)
		return nil, err
	}
	return nil, fmt.Errorf("no operation %q", r.Do)
}

func (a *adapter) config(ctx context.Context, topic string, name string) (any, error) {
	found, err := a.admin.DescribeTopicConfigs(ctx, topic)
	if err != nil {
		return nil, err
	}
	for _, one := range found[0].Configs {
		if one.Key == name {
			return one.MaybeValue(), found[0].Err
		}
	}
	return nil, fmt.Errorf("%s has no %s", topic, name)
}
