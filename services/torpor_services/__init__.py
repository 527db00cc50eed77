"""What every Torpor service stands on: server, channels, configuration, telemetry, security, health."""
