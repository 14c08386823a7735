"""The loopback Hub itself, asked by the real huggingface_hub client."""

from urllib.request import Request, urlopen

import pytest
from hub_server import TOKEN, hub_server
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError


@pytest.fixture
def hub():
    with hub_server() as server:
        yield server


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=TOKEN)


def files(**contents: bytes) -> list[CommitOperationAdd]:
    return [CommitOperationAdd(name.replace("__", "."), content) for name, content in contents.items()]


def test_a_committed_file_comes_back_byte_for_byte(api, tmp_path):
    api.create_repo("org/a")
    large = bytes(range(256)) * 500
    api.create_commit("org/a", files(notes__txt=b"hello", model__safetensors=large), commit_message="one")
    for name, content in {"notes.txt": b"hello", "model.safetensors": large}.items():
        path = api.hf_hub_download("org/a", name, cache_dir=tmp_path)
        assert open(path, "rb").read() == content
    assert set(api.list_repo_files("org/a")) == {".gitattributes", "notes.txt", "model.safetensors"}


def test_an_older_revision_stays_readable_by_commit_and_tag(api, tmp_path):
    api.create_repo("org/a")
    first = api.create_commit("org/a", files(notes__txt=b"one"), commit_message="one")
    api.create_tag("org/a", tag="v1")
    api.create_commit("org/a", files(notes__txt=b"two"), commit_message="two")
    for revision, content in {first.oid: b"one", "v1": b"one", "main": b"two"}.items():
        path = api.hf_hub_download("org/a", "notes.txt", revision=revision, cache_dir=tmp_path)
        assert open(path, "rb").read() == content
    with pytest.raises(RevisionNotFoundError):
        api.model_info("org/a", revision="v9")


def test_a_ranged_read_gives_exactly_those_bytes(hub, api):
    api.create_repo("org/a")
    content = bytes(range(256)) * 40
    api.create_commit("org/a", files(model__safetensors=content), commit_message="one")
    url = f"{hub.endpoint}/org/a/resolve/main/model.safetensors"
    with urlopen(Request(url, headers={"Range": "bytes=1000-1009"})) as response:
        assert (response.status, response.read()) == (206, content[1000:1010])
        assert response.headers["Content-Range"] == f"bytes 1000-1009/{len(content)}"


def test_a_private_repository_is_invisible_without_its_token(hub, api):
    api.create_repo("org/secret", private=True)
    assert api.model_info("org/secret").private
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.endpoint, token=False).model_info("org/secret")
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").whoami()


def test_writing_needs_a_token(hub, api):
    api.create_repo("org/a")
    with pytest.raises(HfHubHTTPError):
        HfApi(endpoint=hub.endpoint, token=False).create_commit("org/a", files(a__txt=b"x"), commit_message="one")
    assert len(hub.repo("org/a").commits) == 1


def test_a_connection_cut_in_a_commit_leaves_the_repository_as_it_was(hub, api):
    api.create_repo("org/a")
    hub.cut_uploads("/commit/")
    with pytest.raises(Exception) as caught:
        api.create_commit("org/a", files(notes__txt=b"x" * 10_000), commit_message="one")
    assert "httpx" in type(caught.value).__module__
    assert set(hub.files("org/a")) == {".gitattributes"}


def test_the_server_refuses_a_licence_it_does_not_know(api):
    api.create_repo("org/a")
    with pytest.raises(ValueError, match="license"):
        api.create_commit("org/a", files(README__md=b"---\nlicense: mine\n---\n# a\n"), commit_message="one")
