"""The fields that deploy/k8s uses of kinds that Kubernetes' own schemas do not have, after their definitions: those of
the Prometheus operator, of KEDA, of the Gateway API and of cert-manager. What is not listed is refused."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def fields(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object with these keys and no other."""
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER_AS_TEXT: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}  # of Go, and of Prometheus
TEXT_BY_NAME: Schema = {"type": "object", "additionalProperties": TEXT}

SCALING = fields(
    {"stabilizationWindowSeconds": COUNT},
    {"policies": list_of(fields({"type": one_of("Pods", "Percent"), "value": COUNT, "periodSeconds": COUNT}))},
)
TRIGGERS = {
    "prometheus": (("AverageValue", "Value"), {"serverAddress": TEXT, "query": TEXT, "threshold": NUMBER_AS_TEXT}),
    "cpu": (("Utilization", "AverageValue"), {"value": NUMBER_AS_TEXT}),
}
SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): fields(
        {
            "selector": fields({"matchLabels": TEXT_BY_NAME}),
            "podMetricsEndpoints": list_of(fields({"port": TEXT, "interval": DURATION})),
        }
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): fields(
        {
            "groups": list_of(
                fields(
                    {
                        "name": TEXT,
                        "rules": list_of(
                            fields(
                                {"alert": TEXT, "expr": TEXT, "labels": TEXT_BY_NAME, "annotations": TEXT_BY_NAME},
                                {"for": DURATION},
                            )
                        ),
                    }
                )
            )
        }
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): fields(
        {
            "scaleTargetRef": fields({"name": TEXT}),
            "minReplicaCount": COUNT,
            "maxReplicaCount": COUNT,
            "pollingInterval": COUNT,
            "cooldownPeriod": COUNT,
            "advanced": fields(
                {
                    "horizontalPodAutoscalerConfig": fields(
                        {"behavior": fields({"scaleDown": SCALING}, {"scaleUp": SCALING})}
                    )
                }
            ),
            "triggers": list_of(
                {
                    "anyOf": [
                        fields(
                            {
                                "type": one_of(name),
                                "name": TEXT,
                                "metricType": one_of(*metric_types),
                                "metadata": fields(metadata),
                            }
                        )
                        for name, (metric_types, metadata) in TRIGGERS.items()
                    ]
                }
            ),
        }
    ),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"): fields(
        {
            "parentRefs": list_of(fields({"name": TEXT, "namespace": TEXT})),
            "hostnames": list_of(TEXT),
            "rules": list_of(
                fields(
                    {
                        "matches": list_of(fields({"method": fields({"service": TEXT})})),
                        "backendRefs": list_of(fields({"name": TEXT, "port": COUNT})),
                    }
                )
            ),
        }
    ),
    ("cert-manager.io/v1", "Certificate"): fields(
        {
            "secretName": TEXT,
            "duration": DURATION,
            "privateKey": fields({"algorithm": one_of("RSA", "ECDSA", "Ed25519"), "size": COUNT}),
            "issuerRef": fields(
                {"name": TEXT, "kind": one_of("Issuer", "ClusterIssuer"), "group": one_of("cert-manager.io")}
            ),
        },
        {
            "isCA": {"type": "boolean"},
            "commonName": TEXT,
            "renewBefore": DURATION,
            "dnsNames": list_of(TEXT),
            "usages": list_of(one_of("server auth", "client auth")),
        },
    ),
    ("cert-manager.io/v1", "Issuer"): {
        "oneOf": [fields({"selfSigned": fields({})}), fields({"ca": fields({"secretName": TEXT})})]
    },
}


def schema_of(api_version: str, kind: str) -> Schema:
    """Of a whole object. Raises KeyError for a kind that is not listed."""
    metadata = fields({"name": TEXT}, {"namespace": TEXT, "labels": TEXT_BY_NAME, "annotations": TEXT_BY_NAME})
    return fields(
        {
            "apiVersion": one_of(api_version),
            "kind": one_of(kind),
            "metadata": metadata,
            "spec": SPECS[api_version, kind],
        }
    )
