"""Several engines on Ray: replicas behind one address with Ray Serve, batch files with ray.data."""

import os

# Seconds in which a proxy must have started. Ray Serve's 5 are too few where libraries are read from disk for the first
# time; it then ends the proxy, and the start fails. Ray's processes take it from the one that starts them.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
