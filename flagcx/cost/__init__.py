"""What schedules and calls cost: traffic, network, simulation and fitted models."""
