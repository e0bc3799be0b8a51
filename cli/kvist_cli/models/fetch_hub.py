"""Worker: `python -m kvist_cli.models.fetch_hub NAME [REVISION]`, a snapshot in the Hugging Face cache."""

from __future__ import annotations

import json
import sys

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# Other forms of the same weights, which vLLM does not read.
_IGNORED = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pth", "original/*", "onnx/*"]


def fetch(name: str, revision: str | None) -> dict[str, str]:
    """{"path": folder} or {"error": text}."""
    what = "it" if revision is None else f"it, at revision {revision!r},"
    try:
        return {"path": snapshot_download(name, revision=revision, ignore_patterns=_IGNORED)}
    except HFValidationError:
        return {"error": f"{what} is neither a folder nor a Hugging Face name (owner/model)"}
    except GatedRepoError:
        return {"error": f"{what} needs a licence to be accepted and a token: set HF_TOKEN"}
    except RepositoryNotFoundError:
        return {"error": f"{what} does not exist on the hub, or needs a token: check the name, set HF_TOKEN"}
    except RevisionNotFoundError:
        return {"error": f"{what} does not exist on the hub: check model.revision"}
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        return {
            "error": f"{what} is not in the Hugging Face cache and the hub cannot be reached "
            f"({type(error).__name__}): give a local folder, or connect once to fetch it"
        }


if __name__ == "__main__":
    answer = fetch(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    print(json.dumps(answer))
    sys.exit("error" in answer)
