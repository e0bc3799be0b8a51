"""Section `model`: what is served."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator, Field, StringConstraints

from kvist_operator.spec.base import Name, Named, Section, Text, passable, rules


class ModelVolume(Section):
    """Where a model lies that is not fetched from a hub. Kubernetes only."""

    claim_name: Name = Field(description="PersistentVolumeClaim that holds the model; mounted read-only.")
    path: Text = Field(default=".", description="Folder of the model inside the volume. Default: its root.")


# How names begin that are no Hugging Face names.
LOCAL_PREFIXES: Final = ("/", ".", "~", "demo/")
AdapterName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]*$", min_length=1, max_length=256)
]


class LoraAdapter(Section):
    """An adapter served under a name of its own; its KV is never shared with another adapter's."""

    name: AdapterName = Field(description="Name in requests and in the keys of its chunks.")
    path: Text = Field(
        description="Folder or Hugging Face name; on Kubernetes a folder, which begins with . or /, "
        "lies in model.volume."
    )
    revision: Annotated[str, StringConstraints(max_length=256), AfterValidator(passable)] = Field(
        default="",
        description="Part of the keys: change it when the weights change. Default: empty.",
    )


class Model(Section):
    """The one model of the cluster."""

    model_config = rules(
        (
            f"has(self.volume) || !{list(LOCAL_PREFIXES)}.exists(p, self.name.startsWith(p))",
            "a model that is no Hugging Face name lies in a volume: give model.volume, its claim and path",
        ),
    )

    name: Text = Field(
        description="A local folder, a Hugging Face name such as HuggingFaceTB/SmolLM2-135M-Instruct, "
        "or demo/SmolLM2-135M-Instruct (converted from a Python package, no download). On Kubernetes every "
        "engine pod fetches a Hugging Face name into its scratch space, unless volume holds the model."
    )
    revision: Text | None = Field(
        default=None,
        description="Commit or branch on the hub; of a folder, a text that changes with the weights. "
        "Default: the hub's main branch.",
    )
    served_name: Text | None = Field(
        default=None, description="Name that clients send. Default: model.name, of a folder its last part."
    )
    volume: ModelVolume | None = Field(
        default=None, description="Volume that holds the model. Kubernetes only. Default: none."
    )
    lora_adapters: Named[LoraAdapter] = Field(
        default=(),
        description="Adapters served beside the model. Default: none.",
    )

    @property
    def from_hub(self) -> bool:
        """Whether it is fetched by its Hugging Face name."""
        return self.volume is None and not self.name.startswith(LOCAL_PREFIXES)
