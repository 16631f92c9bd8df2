"""The leader's side of fetches: the sessions of consumers and followers, and how long a follower's fetch waits."""
