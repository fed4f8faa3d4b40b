"""Several engines on Ray: replicas behind one address with Ray Serve, batch files with ray.data."""
