"""APIs about the cluster: its nodes, partition leaders, supported versions, and the places of replicas."""
