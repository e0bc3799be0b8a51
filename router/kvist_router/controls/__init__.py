"""Controls of the whole cluster, on the admin port: who may, what is meant, every agent asked."""
