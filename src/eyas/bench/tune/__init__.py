"""`eyas tune`: the target's best plain configuration for a goal, found with few server loads and confirmed."""
