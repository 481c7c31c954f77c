"""What eviction buys a server: sizes, costs, a simulated continuous batcher, and what none could beat.  Nothing here needs torch."""
