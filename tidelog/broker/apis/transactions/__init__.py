"""The APIs of transactions that their coordinator answers."""
