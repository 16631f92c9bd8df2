// A Kafka Streams application for test_exactly_once.py: it numbers the records of each key, with a state store behind it.
// Arguments: a file of Streams' properties, the input topic, the output topic.

import java.io.FileInputStream;
import java.io.InputStream;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;

public class CountingStream {
    static String next(String before, String value) {
        int count = before.isEmpty() ? 0 : Integer.parseInt(before.substring(0, before.indexOf(':')));
        return (count + 1) + ":" + value;
    }

    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        try (InputStream file = new FileInputStream(arguments[0])) {
            properties.load(file);
        }
        var text = Serdes.String();
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(arguments[1], Consumed.with(text, text))
            // A changed key sends every record through a repartition topic.
            .selectKey((key, value) -> "word-" + key)
            .groupByKey(Grouped.with(text, text))
            .aggregate(() -> "", (key, value, before) -> next(before, value), Materialized.with(text, text))
            .toStream()
            .to(arguments[2], Produced.with(text, text));
        KafkaStreams streams = new KafkaStreams(builder.build(), properties);
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.setStateListener((now, before) -> System.out.println("state " + now));
        streams.start();
    }
}
