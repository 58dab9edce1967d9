"""The fleet in virtual time: the router's own placement over the replica's own scheduler and cache (see `fleet`)."""
