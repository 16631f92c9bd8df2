// Kafka's own Java clients for histories of transactions: requests as JSON lines on stdin, answers and acknowledgements
// as JSON lines on stdout. tests/transactions/java_client.py is the other end; performing.py says what the methods do.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.ApplicationRecoverableException;
import org.apache.kafka.common.errors.AuthorizationException;
import org.apache.kafka.common.errors.InterruptException;
import org.apache.kafka.common.errors.OutOfOrderSequenceException;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.errors.UnsupportedVersionException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public class TransactionalClients {
    static final ObjectMapper JSON = new ObjectMapper();
    static final PrintStream OUT = System.out;
    static final Map<String, Client> CLIENTS = new ConcurrentHashMap<>();

    static void tell(Map<String, Object> message) {
        try {
            String line = JSON.writeValueAsString(message);
            synchronized (OUT) {
                OUT.println(line);
                OUT.flush();
            }
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    static boolean mayAbort(Throwable error) {
        return error instanceof KafkaException
            && !(error instanceof ProducerFencedException
                || error instanceof OutOfOrderSequenceException
                || error instanceof AuthorizationException
                || error instanceof UnsupportedVersionException
                || error instanceof TimeoutException
                || error instanceof InterruptException
                || error instanceof ApplicationRecoverableException);
    }

    static class Client {
        final ExecutorService thread = Executors.newSingleThreadExecutor();
        final String name;
        final JsonNode settings;
        final KafkaConsumer<String, String> consumer;
        KafkaProducer<String, String> producer, rival, plain;
        Collection<TopicPartition> changed;

        Client(String name, JsonNode settings) {
            this.name = name;
            this.settings = settings;
            Properties own = common();
            own.put("isolation.level", settings.get("isolation").asText());
            own.put("auto.offset.reset", "earliest");
            own.put("enable.auto.commit", "false");
            own.put("fetch.max.wait.ms", "50");
            own.put("max.poll.records", "10");
            boolean isMember = !settings.get("group").isNull();
            if (isMember) {
                own.put("group.id", settings.get("group").asText());
                own.put("session.timeout.ms", "6000");
                own.put("heartbeat.interval.ms", "500");
                own.put("partition.assignment.strategy", RangeAssignor.class.getName());
            }
            consumer = new KafkaConsumer<>(own, new StringDeserializer(), new StringDeserializer());
            if (isMember) {
                consumer.subscribe(List.of(settings.get("input").asText()), new ConsumerRebalanceListener() {
                    public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                        changed = List.of();
                    }

                    public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                        changed = partitions;
                    }
                });
            }
        }

        Properties common() {
            Properties properties = new Properties();
            properties.put("bootstrap.servers", settings.get("bootstrap").asText());
            properties.put("client.id", name);
            properties.put("request.timeout.ms", "3000");
            properties.put("reconnect.backoff.ms", "10");
            properties.put("reconnect.backoff.max.ms", "100");
            properties.put("retry.backoff.ms", "10");
            properties.put("retry.backoff.max.ms", "100");
            properties.put("default.api.timeout.ms", settings.get("timeout_ms").asText());
            return properties;
        }

        KafkaProducer<String, String> producer(boolean isTransactional) {
            Properties own = common();
            own.remove("default.api.timeout.ms");
            own.put("max.block.ms", settings.get("timeout_ms").asText());
            own.put("delivery.timeout.ms", settings.get("transaction_timeout_ms").asText());
            if (isTransactional) {
                own.put("transactional.id", settings.get("transactional_id").asText());
                own.put("transaction.timeout.ms", settings.get("transaction_timeout_ms").asText());
            }
            KafkaProducer<String, String> made = new KafkaProducer<>(own, new StringSerializer(), new StringSerializer());
            if (isTransactional) {
                try {
                    made.initTransactions();
                } catch (RuntimeException error) {
                    drop(made);
                    throw error;
                }
            }
            return made;
        }

        static void drop(KafkaProducer<String, String> producer) {
            if (producer != null) {
                producer.close(Duration.ZERO);
            }
        }

        void serve(JsonNode request) {
            Map<String, Object> answer = new HashMap<>();
            answer.put("reply", request.get("number").asInt());
            try {
                Object result = perform(request);
                answer.put("result", result);
            } catch (Throwable error) {
                answer.put("error", error.toString());
                answer.put("may_abort", mayAbort(error));
            }
            tell(answer);
        }

        Object perform(JsonNode request) throws Exception {
            switch (request.get("call").asText()) {
                case "open":
                    drop(producer);
                    drop(plain);
                    producer = null;
                    plain = null;
                    producer = producer(true);
                    return null;
                case "rival":
                    rival = producer(true);
                    return null;
                case "settle":
                    drop(producer);
                    producer = rival;
                    rival = null;
                    return null;
                case "begin":
                    producer.beginTransaction();
                    return null;
                case "commit":
                    producer.commitTransaction();
                    return null;
                case "abort":
                    producer.abortTransaction();
                    return null;
                case "flush":
                    if (plain != null) {
                        plain.flush();
                    }
                    return null;
                case "send":
                    send(producer, request);
                    return null;
                case "send_plain":
                    if (plain == null) {
                        plain = producer(false);
                    }
                    send(plain, request);
                    return null;
                case "send_offsets":
                    producer.sendOffsetsToTransaction(positions(request), consumer.groupMetadata());
                    return null;
                case "attach":
                    attach(request);
                    return null;
                case "poll":
                    return poll();
                case "rewind":
                    return rewind();
                case "close":
                    drop(producer);
                    drop(rival);
                    drop(plain);
                    consumer.close();
                    return null;
                default:
                    throw new IllegalArgumentException(request.toString());
            }
        }

        void send(KafkaProducer<String, String> by, JsonNode request) {
            String value = request.get("value").asText();
            String topic = request.get("topic").asText();
            by.send(new ProducerRecord<>(topic, request.get("partition").asInt(), null, value), (metadata, error) -> {
                if (error == null) {
                    Map<String, Object> acknowledged = new HashMap<>();
                    acknowledged.put("client", name);
                    acknowledged.put("acknowledged", Long.valueOf(value));
                    acknowledged.put("offset", metadata.hasOffset() ? metadata.offset() : null);
                    tell(acknowledged);
                }
            });
        }

        static Map<TopicPartition, OffsetAndMetadata> positions(JsonNode request) {
            Map<TopicPartition, OffsetAndMetadata> positions = new HashMap<>();
            for (JsonNode each : request.get("positions")) {
                TopicPartition at = new TopicPartition(each.get(0).asText(), each.get(1).asInt());
                positions.put(at, new OffsetAndMetadata(each.get(2).asLong()));
            }
            return positions;
        }

        void attach(JsonNode request) {
            Map<TopicPartition, OffsetAndMetadata> positions = positions(request);
            consumer.assign(positions.keySet());
            positions.forEach(consumer::seek);
        }

        Object poll() {
            List<List<Object>> records = new ArrayList<>();
            for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofMillis(150))) {
                records.add(List.of(each.topic(), each.partition(), each.offset(), Long.valueOf(each.value())));
            }
            Map<String, Object> found = new HashMap<>();
            found.put("records", records);
            List<List<Object>> assigned = new ArrayList<>();
            for (TopicPartition each : consumer.assignment()) {
                assigned.add(List.of(each.topic(), each.partition()));
            }
            found.put("assigned", changed == null ? null : assigned);
            changed = null;
            return found;
        }

        Object rewind() {
            List<List<Object>> positions = new ArrayList<>();
            Map<TopicPartition, OffsetAndMetadata> committed = consumer.committed(new HashSet<>(consumer.assignment()));
            committed.forEach((at, position) -> {
                long offset = position == null ? 0 : position.offset();
                consumer.seek(at, offset);
                positions.add(List.of(at.topic(), at.partition(), offset));
            });
            return positions;
        }
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        tell(Map.of("reply", -1, "result", "started"));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode request = JSON.readTree(line);
            String name = request.get("client").asText();
            Client client = CLIENTS.computeIfAbsent(name, each -> new Client(each, request.get("settings")));
            client.thread.execute(() -> client.serve(request));
            if (request.get("call").asText().equals("close")) {
                client.thread.shutdown();
                CLIENTS.remove(name);
            }
        }
        System.exit(0);
    }
}
