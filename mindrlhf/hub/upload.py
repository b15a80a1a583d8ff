"""Uploads of trained models to Hugging Face's hub."""

from pathlib import Path

from mindrlhf.errors import UserError


def upload_model(
    folder: Path, name: str, *, message: str, private: bool | None, token: str | None, revision: str | None
) -> str:
    """Upload a folder as a model, which is created if needed; returns its address.

    name: id, `owner/name`, or a name alone for the owner of the token. Raises UserError.
    """
    from huggingface_hub import HfApi, constants, errors

    later = "write it with save_model(FOLDER) and upload it later with `hf upload NAME FOLDER`"
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"push_to_hub: HF_HUB_OFFLINE is set, so that {name} is not uploaded; unset it, or {later}.")
    hub = HfApi(endpoint=constants.ENDPOINT, token=token)
    try:
        repository = hub.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            hub.create_branch(repository.repo_id, branch=revision, exist_ok=True)
        hub.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=message, revision=revision)
    except errors.HFValidationError as error:
        raise UserError(f"push_to_hub: {name!r} is no name of a model ({_first(error)}); give owner/name.") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        right = "log in with `hf auth login`, or give hub_token" if status in (401, 403) else later
        raise UserError(f"push_to_hub: {constants.ENDPOINT} refused {name} ({_first(error)}); {right}.") from None
    except Exception as error:  # of whichever HTTP client the package has
        raise UserError(f"push_to_hub: {constants.ENDPOINT} cannot be reached ({_first(error)}); {later}.") from error
    return str(repository)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
