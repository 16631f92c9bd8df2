"""Fetches as a leader answers them: sessions of consumers and of followers, and when a follower's fetch waits."""
