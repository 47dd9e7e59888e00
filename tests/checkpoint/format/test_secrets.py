"""What is masked as a secret, and what is not."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from leyden.checkpoint.format.secrets import (
    HIDDEN,
    MASKED,
    digest_of,
    is_secret,
    masked_lines,
    masked_names,
    masked_text,
    masked_value,
    masked_values,
    masked_words,
)

RANDOM = "q7Vd0ZtB2mKx8LsP4fWn"
HEX = "3f2a9c81d04be576aa13c09f7e2d5b648c1f90ae"
COMMIT = "36e7e72c0f5a1b9d8c3e4f60718293a4b5c6d7e8"

SECRET_NAMES = (
    *("api_key", "apikey", "API_KEY", "apiKey", "openai-api-key", "WANDB_API_KEY", "wandb_key", "model.api_key"),
    *("access_token", "accessToken", "auth_token", "oauth_token", "refresh_token", "hf_token", "HF_TOKEN", "hub_token"),
    *("secret", "client_secret", "clientSecret", "aws_secret_access_key", "secret_key", "secret_id", "private_key"),
    *("password", "passwd", "db_password", "passphrase", "pwd", "pass", "db_pass", "user_pass", "smtp_pass"),
    *("credentials", "creds", "Authorization", "X-Api-Key", "PRIVATE-TOKEN", "SharedAccessKey", "AccountKey", "jwt"),
)
HARMLESS_NAMES = (
    *("token_dim", "num_tokens", "tokenizer", "tokenizer_name", "max_tokens", "pad_token_id", "pad_token", "eos_token"),
    *("key_padding_mask", "keys", "sort_key", "label_key", "key_dim", "num_keys", "kv_key", "attention_key_size"),
    *("author", "authors", "authority", "authenticate", "auth_mode", "forward_pass", "num_passes", "bypass", "compass"),
    *("passthrough", "secretary", "secret_sharing_scheme", "keyword", "monkey", "turkey", "hockey", "tokens_per_step"),
    *("private", "is_private", "public_key_bits", "api", "api_version", "access", "session", "signature_columns"),
    *("password_field", "credentials_provider", "api_key_env", "token_file", "secret_name", "lr", "name", "user"),
)
SECRET_VALUES = {
    "AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "Hugging Face": "hf_" + "aB3" * 11,
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub, fine-grained": "github_pat_" + "1aB_" * 10,
    "GitLab": "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    "OpenAI": "sk-proj-" + RANDOM + "T3BlbkFJ" + RANDOM,
    "Anthropic": "sk-ant-api03-" + RANDOM * 3,
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "Mailchimp": "0123456789abcdef" * 2 + "-us12",
    "npm": "npm_" + "a1B2" * 9,
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + RANDOM * 4,
    "SendGrid": "SG." + "a1B2c3D4e5F6g7H8i9J0kL" + "." + RANDOM * 2 + "abc",
    "Slack": "xoxb-" + "123456789012-abcdefABCDEF",
    "Slack's webhooks": "https://hooks.slack.com/services/" + "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "Square": "sq0csp-" + "a1B2" * 11,
    "Stripe": "sk_live_" + "a1B2c3D4e5F6g7H8i9J0kLmN",
    "Telegram": "110201543:" + "AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw1",
    "Twilio": "SK" + "0a1b2c3d" * 4,
    "Discord": "M" + "TIzNDU2Nzg5MDEyMzQ1Njc4" + "a" + ".a1B2c3." + "a1B2c3d" * 4,
    "Google": "AIza" + "SyD1e2F3g4H5i6J7k8L9m0N1o2P3q4R5s6",
    "W&B": "wandb_v1_" + "a1B2c3D4e5F6g7H8i9J0",
    "Nvidia": "nvapi-" + RANDOM * 3,
    "a key": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n-----END OPENSSH PRIVATE KEY-----",
    "a password in a URL": "postgresql://me:hunter2@db.host:5432/runs",
    "a token in a URL": f"https://{RANDOM}@github.com/me/code",
    "S3, signed": f"https://b.s3.amazonaws.com/x?X-Amz-Date=20260101T000000Z&X-Amz-Signature={HEX}",
    "S3, signed as before": "https://b.s3.amazonaws.com/x?AWSAccessKeyId=me&Signature=vjbyPxybdZaNmGa%2ByT272YEAiv4%3D",
    "Google Cloud, signed": f"https://storage.googleapis.com/b/x?X-Goog-Expires=60&X-Goog-Signature={HEX}",
    "Azure, shared access": "https://a.blob.core.windows.net/c?sv=2022-11-02&se=2026-01-01&sig=dGhpc2lzYXNpZw%3D%3D",
    "Azure, connection": "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=" + "aB3/" * 21 + "aB==",
    "a parameter of a URL": "https://host/data?n=3&access_token=abc&lang=de",
    "a header": "Authorization: Bearer abc",
    "another header": "X-Api-Key: abc",
}
HARMLESS_VALUES = (
    *(COMMIT, HEX, "sha256:" + "0123456789abcdef" * 4, "d41d8cd98f00b204e9800998ecf8427e"),
    *("550e8400-e29b-41d4-a716-446655440000", "2026-01-01T00:00:00.000Z", "v2.13.0+cu128", "0.1", "1e-4"),
    *("bert-base-uncased", "meta-llama/Llama-3.2-1B-Instruct", "facebook/wav2vec2-base-960h", "resnet50imagenet1k"),
    *("sentence-transformers/all-MiniLM-L6-v2", "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k", "sk-learn-models"),
    *(
        "sk-gradient-boosting-classifier-2",
        "SK_learn",
        "hf_dataset",
        "AClassifier",
        "APDatasetOfImages2x",
        "Basic block",
    ),
    *(
        "/data/very/long/path/to/the/imagenet/train/n01440764/n01440764_10026.JPEG",
        "C:\\data\\train",
        "s3://bucket/key",
    ),
    *(
        "https://host/page?key=name&sort=token",
        "ssh://git@host/repo.git",
        "https://host:8080/x",
        "tcp://10.0.0.1:29500",
    ),
    *("dGVzdA==", "QmFzZTY0TmFtZQ==", "a=b", "lr=0.1,momentum=0.9", "{'lr': 0.1}", '{"lr": 0.1, "token": "<pad>"}'),
    *("<|endoftext|>", "[MASK]", "***", "bearer certificates", "key value token"),
    *("observation.images.camera_2", "token_embedding.weight", "model.layers.0.self_attn.k_proj", "me@host.org"),
    *("${WANDB_API_KEY}", "$HOME/x", "{oc.env:HF_TOKEN}", "user:1000", "12:30:45", "localhost:6006", "a: b"),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_mark_secrets(name: str) -> None:
    assert masked_value(name, "abc") == HIDDEN
    assert masked_words(["x.py", f"--{name}", "abc", f"{name}=abc"]) == [
        "x.py",
        f"--{name}",
        HIDDEN,
        f"{name}={HIDDEN}",
    ]
    assert masked_values({"a": [{name: "abc"}]}) == {"a": [{name: MASKED}]}
    assert '"***"' in masked_lines([f'x["{name}"] = "abc"'], quoted=True)[0]


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_other_names_do_not(name: str) -> None:
    for value in (
        "abc",
        "col_2024",
        "resnet50imagenet1k",
        "observation.images.camera_2",
        "<pad>",
        "<extra_id_10>",
        "32",
    ):
        assert masked_value(name, value) == value
        assert masked_words(["x.py", f"--{name}", value]) == ["x.py", f"--{name}", value]
        values = {name: value, "b": {name: [value]}}
        assert masked_values(values) is values
    assert masked_lines([f'{name} = "abc"'], quoted=True) == [f'{name} = "abc"']


@pytest.mark.parametrize("kind", SECRET_VALUES)
def test_formats_mark_secrets(kind: str) -> None:
    secret = SECRET_VALUES[kind]
    # What must not remain: the last part, which is the secret one in URLs and headers.
    hidden = {"a password in a URL": "hunter2", "a token in a URL": RANDOM}.get(kind, secret[-6:].rstrip("="))
    hidden = {"a parameter of a URL": "abc", "a key": "b3Blbn", "another header": "abc"}.get(kind, hidden)
    for shown in (masked_text(secret), *masked_words(["x.py", f"--x={secret}"]), masked_value("x", secret)):
        assert hidden not in shown
    assert hidden not in str(masked_values({"x": secret}))
    assert list(masked_names(masked_values({"x": [secret]}))) == ["x[0]"]
    if "\n" not in secret:
        assert hidden not in masked_lines([f'call("{secret}")'], quoted=True)[0]


@pytest.mark.parametrize("value", HARMLESS_VALUES)
def test_other_values_stay(value: str) -> None:
    assert masked_value("name", value) == value
    assert masked_words(["x.py", value, f"--x={value}", "--x", value]) == ["x.py", value, f"--x={value}", "--x", value]
    values = {"x": value, "revision": {"y": [value]}}
    assert masked_values(values) is values
    assert masked_lines([f'call("{value}")'], quoted=True) == [f'call("{value}")']


@pytest.mark.parametrize("value", [True, False, None, 3, 0.5, "true", "None", "auto", "", "<api_key>", "${KEY}", "***"])
def test_flags_variables_and_placeholders_are_no_secrets(value: Any) -> None:
    values = {"use_auth_token": value, "api_key": value}
    assert masked_values(values) is values


@pytest.mark.parametrize(
    "path", ["~/.ssh/id.pem", "creds.json", "/run/secrets/api_key", "C:\\keys\\my.key", "./conf/secrets.yaml"]
)
def test_files_are_no_secrets(path: str) -> None:
    values = {"credentials": path, "private_key": Path("/keys/id_rsa")}
    assert masked_values(values) is values


def test_ambiguous_names_mark_what_looks_random() -> None:
    for name in ("key", "token", "auth", "bot_token", "deploy_key", "sig", "slack_webhook"):
        for value in (RANDOM, HEX, f"a-{RANDOM}"):
            assert is_secret(name, value)
    assert is_secret("token", "abc123def456") and not is_secret("token", "image0001")
    assert masked_words(["wandb", "login", HEX]) == ["wandb", "login", HIDDEN]


@pytest.mark.parametrize(
    "words,shown",
    [
        (["--api_key", "-abc", "-v"], ["--api_key", HIDDEN, "-v"]),
        (["--api_key", f"--{RANDOM}"], ["--api_key", HIDDEN]),
        (["--password", "--lr", "0.1"], ["--password", "--lr", "0.1"]),
        (["--pass", "hunter2"], ["--pass", HIDDEN]),
        (["--password", "two words, and more"], ["--password", HIDDEN]),
        (["--password=a,b&c d"], [f"--password={HIDDEN}"]),
        (["API_KEY=a,b", "python", "x.py"], [f"API_KEY={HIDDEN}", "python", "x.py"]),
        (["+model.api_key=abc", "model.lr=0.1"], [f"+model.api_key={HIDDEN}", "model.lr=0.1"]),
        (["-H", "Authorization: Bearer abc"], ["-H", f"Authorization: {HIDDEN}"]),
        (["--header=Authorization: Basic YWJj"], [f"--header=Authorization: {HIDDEN}"]),
        (["-H", "Cookie: a=b; session=c"], ["-H", f"Cookie: {HIDDEN}"]),
        (["curl", "-u", "me:hunter2", "https://h"], ["curl", "-u", f"me:{HIDDEN}", "https://h"]),
        (["curl", "-ume:hunter2", "-sS"], ["curl", f"-ume:{HIDDEN}", "-sS"]),
        (["curl", "--user", "me:hunter2"], ["curl", "--user", f"me:{HIDDEN}"]),
        (["curl", "--user=me:hunter2"], ["curl", f"--user=me:{HIDDEN}"]),
        (["docker", "run", "--user", "1000:1000"], ["docker", "run", "--user", "1000:1000"]),
        (["python", "-u", "x.py", "--lr", "0.1"], ["python", "-u", "x.py", "--lr", "0.1"]),
        (["bash", "-c", "curl -u me:hunter2 h"], ["bash", "-c", f"curl -u me:{HIDDEN} h"]),
        (["bash", "-c", "x.py --api_key abc --n 3"], ["bash", "-c", f"x.py --api_key {HIDDEN} --n 3"]),
        (["bash", "-c", "API_KEY='abc' x.py"], ["bash", "-c", f"API_KEY='{HIDDEN}' x.py"]),
        (['{"api_key": "abc", "n": [1, 2]}'], ['{"api_key": "***", "n": [1, 2]}']),
        (['--service={"api_keys": ["abc", "def"]}'], ['--service={"api_keys": ["***", "***"]}']),
        (["--service", "{api_key: abc, n: 3}"], ["--service", "{api_key: ***, n: 3}"]),
        (['{\\"api_key\\": \\"abc\\"}'], ['{\\"api_key\\": \\"***\\"}']),
        (["-c", 'login(key="abc"); f(password="abc")'], ["-c", 'login(key="abc"); f(password="***")']),
    ],
)
def test_commands(words: list[str], shown: list[str]) -> None:
    assert masked_words(words) == shown


def test_code_that_only_names_a_secret_stays() -> None:
    lines = [
        "api_key = os.environ['API_KEY']",
        'headers = {"Authorization": f"Bearer {token}"}',
        'login(token=os.environ["HF_TOKEN"])',
        'parser.add_argument("--num_tokens", type=int)',
        "secret = read(path)",
        'url = "https://host/x?token={token}"',
    ]
    assert masked_lines(lines, quoted=True) == lines


@dataclasses.dataclass(frozen=True)
class Service:
    url: str
    api_key: str


def test_nests_keep_their_types() -> None:
    Pair = namedtuple("Pair", ["name", "password"])
    values = {
        "space": argparse.Namespace(api_key="abc", lr=0.1),
        "data": Service("https://h", "abc"),
        "pair": Pair("me", "abc"),
        "many": ({"x": 1}, {"token": RANDOM}),
        "api_keys": {"one": "abc", "two": ["def"]},
        "raw": {"secret": b"abc"},
        "prompt": "Say the password: please. Key: value",
        7: {"hf_token": "abc"},
    }
    masked = masked_values(values)
    assert vars(masked["space"]) == {"api_key": MASKED, "lr": 0.1}
    assert masked["data"] == Service("https://h", MASKED)
    assert masked["pair"] == Pair("me", MASKED)
    assert masked["many"] == ({"x": 1}, {"token": MASKED})
    assert masked["api_keys"] == {"one": MASKED, "two": [MASKED]}
    assert masked["raw"] == {"secret": MASKED}
    assert masked["prompt"] == values["prompt"] and masked[7] == {"hf_token": MASKED}
    assert "abc" in str(values) and values["space"].api_key == "abc"
    assert masked_values(masked) is masked
    names = ["space.api_key", "data.api_key", "pair.password", "many[1].token", "api_keys.one", "api_keys.two[0]"]
    assert list(masked_names(masked)) == [*names, "raw.secret", "7.hf_token"]
    assert json.dumps(masked["api_keys"]).count(MASKED) == 2


def test_configurations_of_omegaconf_are_masked() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"model": {"api_key": "abc", "width": 8}, "parts": [{"password": "def"}]})
    masked = masked_values({"config": config})["config"]
    assert isinstance(masked, omegaconf.DictConfig)
    assert masked == {"model": {"api_key": MASKED, "width": 8}, "parts": [{"password": MASKED}]}
    assert list(masked_names(masked)) == ["model.api_key", "parts[0].password"]
    plain = omegaconf.OmegaConf.create({"width": 8, "missing": "???", "api_key": "???"})
    assert list(masked_names(plain)) == []
    assert masked_values(plain) is plain


def test_a_digest_tells_equal_secrets_from_others() -> None:
    assert digest_of("abc") == digest_of("abc") != digest_of("abd") and len(digest_of("abc")) == 8
