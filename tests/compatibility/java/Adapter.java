// Kafka's own Java client for the matrix: requests as JSON lines, as tests/compatibility/clients/speaking.py describes them.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.stream.IntStream;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.consumer.RoundRobinAssignor;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.utils.AppInfoParser;

public class Adapter {
    static final long WAIT_MS = 30_000;
    static final ObjectMapper JSON = new ObjectMapper();

    final String bootstrap;
    final Administration administration;
    final Map<String, Member> members = new HashMap<>();

    Adapter(String bootstrap) {
        this.bootstrap = bootstrap;
        this.administration = new Administration(common());
    }

    Properties common() {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", bootstrap);
        properties.put("client.id", "java");
        return properties;
    }

    KafkaConsumer<byte[], byte[]> consumer(Map<String, String> more) {
        Properties properties = common();
        properties.put("enable.auto.commit", "false");
        properties.put("auto.offset.reset", "earliest");
        properties.putAll(more);
        return new KafkaConsumer<>(properties, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static byte[] bytes(JsonNode text) {
        return text.isNull() ? null : Base64.getDecoder().decode(text.asText());
    }

    static String text(byte[] data) {
        return data == null ? null : Base64.getEncoder().encodeToString(data);
    }

    // ------------------------------------------------------------------------------------------------------- records

    Object produce(JsonNode request) throws Exception {
        Properties properties = common();
        properties.put("acks", request.get("acks").asText());
        properties.put("enable.idempotence", request.get("idempotent").asText());
        properties.put("compression.type", request.get("codec").asText());
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        List<Long> offsets = new ArrayList<>();
        try (var producer = new KafkaProducer<>(properties, new ByteArraySerializer(), new ByteArraySerializer())) {
            for (JsonNode one : request.get("records")) {
                var record = new ProducerRecord<>(
                        request.get("topic").asText(), one.get("partition").asInt(), one.get("timestamp").asLong(),
                        bytes(one.get("key")), bytes(one.get("value")));
                for (JsonNode header : one.get("headers")) {
                    record.headers().add(header.get(0).asText(), bytes(header.get(1)));
                }
                sent.add(producer.send(record));
            }
            for (Future<RecordMetadata> one : sent) {
                offsets.add(one.get().offset());
            }
        }
        return offsets;
    }

    Object read(JsonNode request) {
        String topic = request.get("topic").asText();
        int count = request.get("count").asInt();
        List<Object> found = new ArrayList<>();
        long deadline = System.currentTimeMillis() + WAIT_MS;
        try (var consumer = consumer(Map.of())) {
            var partitions = IntStream.range(0, request.get("partitions").asInt())
                    .mapToObj(index -> new TopicPartition(topic, index)).toList();
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            while (found.size() < count && System.currentTimeMillis() < deadline) {
                consumer.poll(Duration.ofMillis(100)).forEach(record -> found.add(told(record)));
            }
        }
        return found.size() > count ? found.subList(0, count) : found;
    }

    static Object told(ConsumerRecord<byte[], byte[]> record) {
        List<Object> headers = new ArrayList<>();
        for (Header header : record.headers()) {
            headers.add(java.util.Arrays.asList(header.key(), text(header.value())));
        }
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("partition", record.partition());
        fields.put("offset", record.offset());
        fields.put("timestamp", record.timestamp());
        fields.put("key", text(record.key()));
        fields.put("value", text(record.value()));
        fields.put("headers", headers);
        return fields;
    }

    // -------------------------------------------------------------------------------------------------------- groups

    /** A consumer in a group, polled by a thread of its own. */
    static class Member extends Thread {
        final KafkaConsumer<byte[], byte[]> consumer;
        final List<List<Long>> got = new ArrayList<>();
        volatile List<Integer> assigned = List.of();
        volatile boolean ending;

        Member(KafkaConsumer<byte[], byte[]> consumer, String topic) {
            this.consumer = consumer;
            consumer.subscribe(List.of(topic));
            setDaemon(true);
            start();
        }

        @Override
        public void run() {
            try (consumer) {
                while (!ending) {
                    var records = consumer.poll(Duration.ofMillis(100));
                    synchronized (got) {
                        records.forEach(one -> got.add(List.of((long) one.partition(), one.offset())));
                    }
                    assigned = consumer.assignment().stream().map(TopicPartition::partition).sorted().toList();
                }
            }
        }

        Object state() {
            synchronized (got) {
                return Map.of("assigned", assigned, "got", List.copyOf(got));
            }
        }

        void leave() throws InterruptedException {
            ending = true;
            join(WAIT_MS);
        }
    }

    static final Map<String, Class<?>> STRATEGIES = Map.of(
            "range", RangeAssignor.class, "roundrobin", RoundRobinAssignor.class,
            "cooperative", CooperativeStickyAssignor.class);

    void join(JsonNode request) {
        var consumer = consumer(Map.of(
                "group.id", request.get("group").asText(),
                "session.timeout.ms", "10000",
                "heartbeat.interval.ms", "200",
                "partition.assignment.strategy", STRATEGIES.get(request.get("strategy").asText()).getName()));
        members.put(request.get("member").asText(), new Member(consumer, request.get("topic").asText()));
    }

    void commit(JsonNode request) {
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        request.get("offsets").properties().forEach(one -> offsets.put(
                new TopicPartition(request.get("topic").asText(), Integer.parseInt(one.getKey())),
                new OffsetAndMetadata(one.getValue().asLong())));
        try (var consumer = consumer(Map.of("group.id", request.get("group").asText()))) {
            consumer.assign(offsets.keySet());
            consumer.commitSync(offsets);
        }
    }

    Object committed(JsonNode request) {
        Map<String, Long> found = new TreeMap<>();
        try (var consumer = consumer(Map.of("group.id", request.get("group").asText()))) {
            for (int index = 0; index < request.get("partitions").asInt(); index++) {
                var partition = new TopicPartition(request.get("topic").asText(), index);
                var offset = consumer.committed(Set.of(partition)).get(partition);
                found.put(String.valueOf(index), offset == null ? -1 : offset.offset());
            }
        }
        return found;
    }

    // ------------------------------------------------------------------------------------------------------ the loop

    Object operation(JsonNode request) throws Exception {
        String member = request.path("member").asText();
        switch (request.get("do").asText()) {
            case "version":
                return AppInfoParser.getVersion();
            case "produce":
                return produce(request);
            case "read":
                return read(request);
            case "join":
                join(request);
                return null;
            case "member":
                return members.get(member).state();
            case "leave":
                members.remove(member).leave();
                return null;
            case "commit":
                commit(request);
                return null;
            case "committed":
                return committed(request);
            default:
                return administration.operation(request);
        }
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        var adapter = new Adapter(arguments[0]);
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, Object> answer = new HashMap<>();
            try {
                answer.put("ok", adapter.operation(JSON.readTree(line)));
            } catch (Exception error) {
                Throwable cause = error instanceof ExecutionException ? error.getCause() : error;
                cause.printStackTrace();
                answer.put("failed", cause.toString());
            }
            answers.println(JSON.writeValueAsString(answer));
            answers.flush();
        }
        for (Member member : adapter.members.values()) {
            member.leave();
        }
        System.exit(0);
    }
}
