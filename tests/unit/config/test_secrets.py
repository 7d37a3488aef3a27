"""Secrets among settings are hidden, by name and by shape, wherever settings leave the run; innocents stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.run_dir import CONFIG_FILE, write_run_config
from asyncrl.config.secrets import HIDDEN, hide, is_secret, shown, without_secrets
from asyncrl.config.setting import ConfigError
from asyncrl.launch.commands import refuse
from asyncrl.launch.help import experiment_help, resolved_yaml
from asyncrl.observe.dashboard import page_data
from asyncrl.observe.history import History

RANDOM = "0123456789abcdefABCDEF"
NAMES = """openai_key OPENAI_API_KEY api_key apiKey apikey x-api-key X-Api-Key password passwd db_password pwd secret
client_secret token access_token auth_token hf_token HF_TOKEN github_token refresh_token authorization auth basic_auth
credentials aws_secret_access_key AWS_SESSION_TOKEN private_key ssh_private_key judge_key azure_key account_key
encryption_key session_key cookie jwt passphrase license_key pat api_keys anthropicApiKey my.judge.openai_key"""
INNOCENT = """max_tokens tokenizer key_bits eos_token eos_token_id pad_token stop_token_ids allowed_token_ids tokens
max_new_tokens token_ids prompt_key label_key keys key monkey keyboard sort_keys metric_keys tokenize public_key
num_key_value_heads key_size author authors secretary passage password_file token_file secret_name think_token path
tokens_per_micro_batch cache_key first_token compass patient tokenizer_path url"""
SHAPES = f"""sk-{RANDOM}|sk-proj-{RANDOM}|hf_{RANDOM}|ghp_{RANDOM}|github_pat_{RANDOM}|glpat-{RANDOM}|npm_{RANDOM}
xoxb-123456789-abcdef|AKIAIOSFODNN7EXAMPLE|eyJhbGciOiJI.eyJzdWIiOiIxMjM0.SflKxwRJ|AIza{RANDOM}{RANDOM}|gsk_{RANDOM}
https://me:hunter2@judge.example/v1|postgres://u:hunter2@h/db|redis://:hunter2@h:6379|https://hunter2@github.com/a/b
https://ghp_{RANDOM}@github.com/a|https://hooks.slack.com/services/T0/B0/hunter2|Bearer hunter2|Basic dXNlcjpwYXNz
Authorization: Bearer hunter2|Authorization: Basic dXNlcjpwYXNz|X-Api-Key: hunter2|https://h/v1?token=hunter2&x=1
url=https://h/v1?api_key=hunter2#f|https://h/?x=1&access_token=hunter2|--api-key hunter2|--api-key=hunter2
OPENAI_API_KEY=hunter2 python x.py|curl -H 'Authorization: Bearer hunter2' https://h|Server=h;Password=hunter2;User=u
AccountKey=hunter2==;x|{{'openai_key': 'hunter2', 'x': 1}}|{{openai_key: hunter2, x: 1}}|{{"password":"hunter2"}}
--password 'hunter2 x'|with {{x: 1, openai_key: hunter2}}|reads (openai_key: hunter2)""".replace("\n", "|").split("|")
READABLE = """https://judge.example/v1?model=x&max_tokens=5|my_secret.py:score|pkg.token:Reward|path/api_key.py:f
ssh://git@host/x|git@github.com:a/b|the token: a b|sk-learn|basic arithmetic|max_tokens=5|--max-tokens 5|tokens: 5
--tokenizer /x|{eos_token: </s>}|key=value|sort_key=name|https://h:8000/v1|give HF_TOKEN: it is gated
disk-based-approach-for-long-texts|risk-averse-agents-in-markets-2024|user@host:/path""".replace("\n", "|").split("|")


@pytest.mark.parametrize("name", NAMES.split())
def test_usual_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)
    assert without_secrets({name: "x", "y": [{name: ["x"]}]}) == {name: HIDDEN, "y": [{name: [HIDDEN]}]}


@pytest.mark.parametrize("name", INNOCENT.split())
def test_names_that_only_look_like_those_of_secrets_stay(name: str) -> None:
    assert without_secrets({name: "x"}) == {name: "x"}


@pytest.mark.parametrize("text", SHAPES)
def test_texts_of_the_shape_of_secrets_are_hidden_and_the_rest_of_them_stays(text: str) -> None:
    found = hide(text)
    assert HIDDEN in found
    for part in ("hunter2", RANDOM, "dXNlcjpwYXNz", "EXAMPLE", "SflKxwRJ", "abcdef"):
        assert part not in found
    assert hide(found) == found
    for part in ("judge.example/v1", "github.com/a", "python x.py", "User=u", "x=1", "'x': 1"):
        assert (part in found) == (part in text)


@pytest.mark.parametrize("text", READABLE)
def test_texts_that_only_look_like_secrets_stay(text: str) -> None:
    assert hide(text) == text


def test_a_private_key_is_hidden_whole() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----"
    assert hide(f"a\n{key}\nb") == f"a\n{HIDDEN}\nb"


def test_commands_pairs_and_variables_in_lists_are_looked_through() -> None:
    given = {
        "command": ["serve", "--api-key", "hunter2", "--port", "80", "--token=hunter2"],
        "headers": [["Authorization", "hunter2"], ["Accept", "json"]],
        "env": [{"name": "OPENAI_API_KEY", "value": "hunter2"}, {"name": "MODE", "value": "fast"}],
        "credentials": {"user": "hunter2", "numbers": ["hunter2"]},
        "password": 12345,
        "eos_token": 2,
        "judge_key": 7,
        "columns": ["password", "user", "mail"],
    }
    found = without_secrets(given)
    assert "hunter2" not in str(found)
    assert "12345" not in str(found)
    assert found["command"] == ["serve", "--api-key", HIDDEN, "--port", "80", f"--token={HIDDEN}"]
    assert found["headers"][1] == ["Accept", "json"]
    assert found["env"] == [{"name": "OPENAI_API_KEY", "value": HIDDEN}, {"name": "MODE", "value": "fast"}]
    assert all(found[name] == given[name] for name in ("eos_token", "judge_key", "columns"))


def test_what_a_setting_does_not_have_is_no_secret() -> None:
    given = {"password": None, "secret": False, "api_key": "", "env": [{"name": None, "value": "x"}]}
    assert without_secrets(given) == given


def test_a_message_shows_a_long_value_in_part_and_a_secret_not_at_all() -> None:
    assert shown("path", "x" * 200) == repr("x" * 200)
    assert shown("path", "x" * 201) == repr("x" * 200 + "...")
    assert shown("api_key", "x") == repr(HIDDEN)


@pytest.fixture
def config() -> ExperimentConfig:
    values = {
        "reward.args": {"url": "https://me:hunter2@judge/v1", "openai_key": "hunter2", "header": "Bearer hunter2"}
    }
    config = load_experiment("async_ppo", ["experiment_name=tokens"], values=values)
    assert isinstance(config, ExperimentConfig)
    return config


def test_help_and_the_printed_config_hide_them_and_the_file_that_the_run_reads_is_private(
    config: ExperimentConfig, tmp_path: Path
) -> None:
    for text in (resolved_yaml(config), experiment_help("async_ppo", config)):
        assert "hunter2" not in text
        assert "https://(hidden)@judge/v1" in text
    write_run_config(config, tmp_path)
    assert (tmp_path / CONFIG_FILE).stat().st_mode & 0o077 == 0
    assert "hunter2" in (tmp_path / CONFIG_FILE).read_text()
    assert "hunter2" not in str(page_data(History(tmp_path)))


def test_messages_hide_them(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (
        "reward.args={openai_key: hunter2, x: [}",
        "reward.judge_key=hunter2",
        "trial_nme=https://a:hunter2@h",
    ):
        with pytest.raises(ConfigError) as caught:
            load_experiment("async_ppo", [given])
        assert "hunter2" not in str(caught.value)
        assert HIDDEN in str(caught.value)
    refuse("it was {'api_key': 'hunter2'}")
    assert capsys.readouterr().err == "error: it was {'api_key': (hidden)}\n"
