"""The one loop, jobs, the run folder, reports. It knows requests and backends, and no conversation."""
