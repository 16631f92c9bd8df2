import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.TreeMap;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.GroupListing;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;

/** What Kafka's admin client does for the matrix. */
class Administration {
    private final Admin admin;

    Administration(Properties properties) {
        admin = Admin.create(properties);
    }

    Object operation(JsonNode request) throws Exception {
        String topic = request.path("topic").asText();
        String group = request.path("group").asText();
        switch (request.get("do").asText()) {
            case "create_topic":
                return create(topic, request);
            case "topics":
                return admin.listTopics().names().get().stream().sorted().toList();
            case "partitions":
                return admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().size();
            case "add_partitions":
                var total = NewPartitions.increaseTo(request.get("total").asInt());
                return admin.createPartitions(Map.of(topic, total)).all().get();
            case "delete_topic":
                return admin.deleteTopics(List.of(topic)).all().get();
            case "config":
                var resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
                var configs = admin.describeConfigs(List.of(resource)).all().get().get(resource);
                return configs.get(request.get("name").asText()).value();
            case "set_config":
                return set(topic, request.get("name").asText(), request.get("value").asText());
            case "brokers":
                return admin.describeCluster().nodes().get().size();
            case "start_offset":
                return offset(topic, OffsetSpec.earliest());
            case "end_offset":
                return offset(topic, OffsetSpec.latest());
            case "delete_records":
                var before = RecordsToDelete.beforeOffset(request.get("before").asLong());
                return admin.deleteRecords(Map.of(new TopicPartition(topic, 0), before)).all().get();
            case "groups":
                return admin.listGroups().all().get().stream().map(GroupListing::groupId).sorted().toList();
            case "group":
                return describe(group);
            case "group_offsets":
                return offsets(group);
            case "set_group_offset":
                var wanted = new OffsetAndMetadata(request.get("offset").asLong());
                var offsets = Map.of(new TopicPartition(topic, 0), wanted);
                return admin.alterConsumerGroupOffsets(group, offsets).all().get();
            case "delete_group":
                return admin.deleteConsumerGroups(List.of(group)).all().get();
            default:
                throw new IllegalArgumentException("no operation " + request.get("do"));
        }
    }

    private Object create(String name, JsonNode request) throws Exception {
        Map<String, String> configs = new HashMap<>();
        request.get("configs").properties().forEach(one -> configs.put(one.getKey(), one.getValue().asText()));
        var replicas = Optional.of((short) request.get("replicas").asInt());
        var topic = new NewTopic(name, Optional.of(request.get("partitions").asInt()), replicas).configs(configs);
        return admin.createTopics(List.of(topic)).all().get();
    }

    private Object set(String topic, String name, String value) throws Exception {
        var change = new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET);
        var resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        return admin.incrementalAlterConfigs(Map.of(resource, List.of(change))).all().get();
    }

    private Object offset(String topic, OffsetSpec which) throws Exception {
        var partition = new TopicPartition(topic, 0);
        return admin.listOffsets(Map.of(partition, which)).all().get().get(partition).offset();
    }

    private Object describe(String group) throws Exception {
        var found = admin.describeClassicGroups(List.of(group)).all().get().get(group);
        return Map.of("state", found.state().toString(), "members", found.members().size());
    }

    private Object offsets(String group) throws Exception {
        Map<String, Map<String, Long>> found = new TreeMap<>();
        admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().forEach((partition, offset) -> found
                .computeIfAbsent(partition.topic(), name -> new TreeMap<>())
                .put(String.valueOf(partition.partition()), offset.offset()));
        return found;
    }
}
