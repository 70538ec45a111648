"""Work on a shared file system: leases, and retries of calls that fail for a while."""
