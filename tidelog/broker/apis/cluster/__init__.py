"""APIs about the cluster: who is in it, who leads what, what a node serves, where replicas lie."""
