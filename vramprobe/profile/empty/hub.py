"""Repositories of the hub that are not in its cache, made in the run's folder the moment that they are asked for.

In: a repository's id, or a local folder; the configs of vramprobe's catalog. Out: a folder as the hub's cache has it,
with links to all that is there, and in the place of what is missing: the catalog's config, empty weights, a tokenizer.
huggingface_hub then reads it as if it had been downloaded. The hub's own cache is never written to.
"""

import hashlib
import importlib.util
import json
import os

from vramprobe_values.imports import instead_of

from . import checkpoint, pipelines, present, processors, quantised, sentences, tokenizer
from .replacements import Refused, complain, link, locked, write_json

_ASSUMED_DTYPE = "bfloat16"
_ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "deberta-v2", "modernbert", "electra", "albert")
_OPTION = "--empty-weights"


def _load_names():
    """catalog/names.py, which this package's processes have no vramprobe to import from."""
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "catalog", "names.py")
    spec = importlib.util.spec_from_file_location("vramprobe_empty.names", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model_names = _load_names()


class Repositories:
    """Those of one run. ``known``: lower-case id or slug → {hf_id, config: a path, dtype or None}."""

    def __init__(self, folder, known, replacements):
        self._home, self._known, self._replacements = os.path.join(folder, "hub"), known, replacements
        self._made = {}

    def folder_for(self, path):
        """A folder of the run in place of a local one that has its configs but lacks something; else ``path``."""
        if not any(os.path.isfile(os.path.join(path, name)) for name in ("config.json", pipelines.INDEX)):
            return path
        whole = os.path.abspath(path)
        if whole.startswith(self._home + os.sep):  # a part of a pipeline that was made: its tokenizer is beside it
            return path
        if whole not in self._made:
            self._made[whole] = path  # what is asked for while it is made
            self._made[whole] = self._guarded(lambda: self._local(whole)) or path
        return self._made[whole]

    def name_of(self, path):
        """The id of the repository whose folder in the run's cache ``path`` is; else ``path``."""
        home, found = os.path.join(self._home, "models--"), os.path.abspath(path)
        if not found.startswith(home):
            return path
        return found.removeprefix(home).partition(os.sep)[0].replace("--", "/")

    def instead(self, repo_id, usual):
        """The folder of a repository in the run's own cache; ``usual`` where the hub's will do."""
        if repo_id not in self._made:
            self._made[repo_id] = usual
            self._made[repo_id] = self._guarded(lambda: self._repository(repo_id, usual)) or usual
        return self._made[repo_id]

    def _guarded(self, make):
        try:
            return make()
        except Refused as error:
            self._replacements.missing(str(error))
        except Exception as error:  # the command goes on to its own error
            complain(error)
        return None

    def _repository(self, repo_id, usual):
        """The folder of a repository in the run's own cache; None where the hub's cache will do."""
        from huggingface_hub.constants import HF_HUB_CACHE

        cached = present.snapshot(os.path.join(HF_HUB_CACHE, usual))
        there = os.listdir(cached) if cached else []
        if there and (not {"config.json", pipelines.INDEX} & set(there) or _is_whole(cached)):
            return None  # whole, or neither a model of transformers' nor a pipeline: an adapter, a kernel
        config, origin = self._config(repo_id, cached)
        home = os.path.join(self._home, usual)
        commit = hashlib.sha1(json.dumps([repo_id, config]).encode()).hexdigest()
        entry, _ = self._entry(repo_id)
        folder = os.path.join(home, "snapshots", commit)
        self._make(folder, repo_id, config, cached, origin, entry)
        os.makedirs(os.path.join(home, "refs"), exist_ok=True)
        with open(os.path.join(home, "refs", "main"), "w") as out:
            out.write(commit)
        return home

    def _local(self, path):
        if _is_whole(path):
            return None
        config = _config_in(path)
        folder = os.path.join(self._home, "local--" + hashlib.sha1(path.encode()).hexdigest())
        self._make(folder, path, config, path, None)
        return folder

    def _config(self, repo_id, cached):
        """(config, where it came from if not from the repository). Raises Refused for an id that nobody knows."""
        if cached:
            return _config_in(cached), None
        entry, by = self._entry(repo_id)
        if entry is None:
            near = dict.fromkeys(self._known[one]["hf_id"] for one in model_names.nearest_names(repo_id, self._known))
            raise Refused(
                f"{_OPTION} knows no model {repo_id!r}. {'Nearest: ' + ', '.join(near) + '. ' if near else ''}Use an "
                "id or a slug of `vramprobe models`, the path of a folder with its config.json, or fetch that file "
                f"alone once: hf download {repo_id} config.json (of a pipeline of diffusers: hf download {repo_id} "
                "--include '*.json' '*.txt' '*.model'). What is neither (a robot's policy, an adapter) is needed "
                f"whole, before the run: hf download {repo_id}"
            )
        with open(entry["config"], encoding="utf-8") as file:
            config = json.load(file)
        if not pipelines.are_files(config):
            return {**config, **entry.get("quantised", {})}, by
        if entry.get("quantised"):
            raise Refused(
                f"{_OPTION} has no weights for {repo_id!r}, a pipeline that is quantised already: take the one that it "
                f"was made of, {entry['hf_id']}, and quantise it on loading"
            )
        return pipelines.with_references(config, self._known), by

    def _entry(self, repo_id):
        """(the catalog's row of that id or of one with its shape, or None; how it is known). Raises Refused."""
        match = model_names.match_name(repo_id, self._known)
        if match is None:
            return None, ""
        entry, end = self._known[match.known], match.quantized
        if match.known == repo_id.lower() and not entry.get("is_shared"):
            return entry, "that of vramprobe's catalog"
        entry = {**entry, "quantised": {}}
        if not end:
            return entry, f"that of {entry['hf_id']} in vramprobe's catalog, taken for alike by its name"
        if (config := model_names.QUANTIZED[end]) is None:
            raise Refused(
                f"{_OPTION} has no weights for {repo_id!r}: {end[1:]} does not tell the layout of its tensors; take "
                f"the model that it was made of, {entry['hf_id']}"
            )
        more = {"torch_dtype": "float16"} if config["quant_method"] in ("awq", "gptq") else {}
        by = f"that of {entry['hf_id']} in vramprobe's catalog, quantised as its name says: assumed"
        return {**entry, "quantised": {**more, "quantization_config": config}}, by

    def _make(self, folder, name, config, source, origin, entry=None):
        """Once for all processes: links to what is in ``source``, and what it lacks."""
        os.makedirs(self._home, exist_ok=True)
        with locked(os.path.join(self._home, "making")):
            if os.path.exists(folder + ".whole"):
                return
            os.makedirs(folder, exist_ok=True)
            if source:
                link(source, folder)
            if pipelines.are_files(config):
                made = pipelines.fill(folder, config, (entry or {}).get("dtype"))
            else:
                made = fill(folder, config, source, entry or {})
            with open(folder + ".whole", "w"):
                pass
        if origin:
            self._replacements.replaced("config", name, origin)
        for kind, by in made.items():
            self._replacements.replaced(kind, name, by)


def serve_cache(module, run):
    """huggingface_hub.file_download: its one function for the folder of a repository in any cache.

    What it returns is joined to a cache's path, and an absolute path stays what it is. Releases before 1.0 look
    into the cache by a name of their own, which transformers 4 reads.
    """

    @instead_of(module, "repo_folder_name")
    def repo_folder_name(plain, *, repo_id, repo_type):
        usual = plain(repo_id=repo_id, repo_type=repo_type)
        return run.repositories.instead(repo_id, usual) if repo_type == "model" else usual

    @instead_of(module, "try_to_load_from_cache")
    def try_to_load_from_cache(look, repo_id, filename, cache_dir=None, revision=None, repo_type=None):
        home = repo_folder_name(repo_id=repo_id, repo_type=repo_type or "model")
        return look(repo_id, filename, os.path.dirname(home) or cache_dir, revision, repo_type)


def serve_listing(module, run):
    """huggingface_hub.hf_api: the files of a repository that was made here, which vLLM lists for bitsandbytes."""

    @instead_of(module.HfApi, "list_repo_files")
    def list_repo_files(plain, api, repo_id, **options):
        made = run.repositories.instead(repo_id, "") if options.get("repo_type") in (None, "model") else ""
        return sorted(os.listdir(present.snapshot(made))) if made else plain(api, repo_id, **options)

    module.list_repo_files = module.api.list_repo_files


def fill(folder, config, source, entry):
    """Weights, a tokenizer and a processor ``folder`` lacks; without ``source`` its config too. -> what is made."""
    made = {}
    if not source:
        write_json(folder, "config.json", config)
    read = None
    if not present.has_weights(folder):
        present.remove_weights(folder)  # shards without the others
        read = _read(folder, config)
        made["weights"] = _write_weights(folder, config, read, entry.get("dtype"))
    if not present.has_tokenizer(folder):
        read = read or _read(folder, config)
        made["tokenizer"] = _write_tokenizer(folder, config, read)
    if processors.of(config) and not os.path.exists(os.path.join(folder, "preprocessor_config.json")):
        made["processor"] = processors.write(folder, config, read or _read(folder, config))
    if entry.get("pooling") and not os.path.exists(os.path.join(folder, "modules.json")):
        read = read or _read(folder, config)
        made["sentence embedding"] = sentences.write(folder, entry["pooling"], read.hidden_size)
    return made


def _read(folder, config):
    """The config as transformers' own class. Raises Refused for code of the model's own."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config.get("auto_map") or config.get("model_type") not in CONFIG_MAPPING_NAMES:
        raise Refused(
            f"{_OPTION} has no weights for {config.get('model_type')!r}: its model is code of its own "
            "(trust_remote_code), or not of this transformers; download it, or take a model that transformers knows"
        )
    if config.get("quantization_config") and (why := quantised.why_not(config["quantization_config"])):
        raise Refused(
            f"{_OPTION} has no weights for a checkpoint that is quantised already as this one is ({why}): take the "
            "model that it was made of, and quantise it on loading"
        )
    return AutoConfig.from_pretrained(folder)


def _write_weights(folder, config, read, known):
    """In the dtype that the config names, else the catalog's, else an assumed one; -> what they are."""
    said = str(config.get("dtype") or config.get("torch_dtype") or known or "").removeprefix("torch.")
    model, dtype, quantization = checkpoint.model_of(read), said or _ASSUMED_DTYPE, config.get("quantization_config")
    count = checkpoint.write(model, folder, dtype, quantization=quantization)
    of = f"as {quantization['quant_method']}, what is not quantized in {dtype}" if quantization else f"in {dtype}"
    assumed = "" if said else ", assumed"
    return f"empty files of {type(model).__name__}, {count / 1e9:.2f} billion parameters {of}{assumed}"


def _write_tokenizer(folder, config, read):
    """With the special tokens that the config names, an encoder's own, and those of images; -> what it is."""
    text = read.get_text_config() if hasattr(read, "get_text_config") else read
    ids = {role: getattr(text, f"{role}_token_id", None) for role in ("bos", "eos", "pad")}
    ids = {role: getattr(read, f"{role}_token_id", None) if one is None else one for role, one in ids.items()}
    ids = {role: one[0] if isinstance(one, list) and one else one for role, one in ids.items()}
    placed, words, named = processors.tokens(config, read)
    if config.get("model_type") in _ENCODERS:
        named = {**named, **tokenizer.ENCODER}
    length = getattr(text, "max_position_embeddings", None)
    kind = (processors.of(config) or {}).get("tokenizer")
    tokenizer.write(folder, text.vocab_size, ids, length, placed=placed, words=words, named=named, kind=kind)
    return f"one of bytes and English words, {text.vocab_size:,} tokens, with a chat template"


def _config_in(folder):
    """A model's config, or those of a pipeline by their path."""
    if files := pipelines.read(folder):
        return files
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        return json.load(file)


def _is_whole(folder):
    files = pipelines.read(folder)
    return pipelines.is_whole(folder, files) if files else present.is_whole(folder)
