"""The cluster's metadata: records replayed to images, and images written as records."""
