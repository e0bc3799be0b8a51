"""Where the list of replicas comes from.

source      the contract
static      the settings
file        a YAML file that is read again when it changes
kubernetes  EndpointSlices of a headless Service: kubernetes_api talks to the API server, endpoint_slices
            turns its objects into replicas
"""
