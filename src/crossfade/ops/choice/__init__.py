"""Which algorithm does a call: candidates, the model of their times, measurements, the cache; warm-up and replays."""
