"""The demo: a real data set through the broker, a consumer group and Spark."""
