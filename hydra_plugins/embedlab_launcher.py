"""What Hydra takes from the package `hydra_plugins` only: the launcher of sweeps, and further configuration folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf, open_dict


class EmbedlabLauncher(Launcher):
    """Writes every trial's resolved configuration and hands them to `embedlab.run.sweep.run_trials`."""

    def __init__(self, parallel: int | None = None) -> None:
        self.parallel = parallel
        self.config: Any = None
        self.hydra_context: Any = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from embedlab.cli.permission import check_permission
        from embedlab.run.parse import parse_shared
        from embedlab.run.sweep import FINISHED, Trial, run_trials, summarise

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        sweep = Path(str(self.config.hydra.sweep.dir))
        trials = []
        for index, overrides in enumerate(job_overrides, start=initial_job_idx):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = index
            folder = sweep / str(config.hydra.sweep.subdir)
            run = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
            values = OmegaConf.to_container(run, resolve=True)
            check_permission(values, config.hydra.overrides.task)
            if not values.get("stages"):  # a slip in the last of many trials is said before the first
                parse_shared(values)
            trials.append(Trial(folder, values, filter_overrides(overrides)))
        statuses = run_trials(trials, sweep, self.parallel)
        summarise(sweep, trials)
        returns = []
        for trial, status in zip(trials, statuses, strict=True):
            job = JobReturn(overrides=list(trial.overrides), working_dir=str(trial.folder))
            # Hydra would raise at the first failure and forget the others.
            job.status, job.return_value = JobStatus.COMPLETED, status
            returns.append(job)
        if any(status != FINISHED for status in statuses):
            raise SystemExit(1)
        return returns


class EmbedlabSearchPath(SearchPathPlugin):
    """Behind this project's ``conf/``, those of the distributions that add parts: ``method=NAME`` finds their files."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from embedlab.files import conf_dir
        from embedlab.parts import conf_dirs

        # Hydra asks for every program; another one's configuration is not ours to add to.
        if any(entry.path.endswith(str(conf_dir())) for entry in search_path.get_path()):
            for folder in conf_dirs():
                search_path.append("embedlab", f"file://{folder}")


# `parallel`: trials at once; null: one for each CUDA device, one on the CPU.
ConfigStore.instance().store(
    group="hydra/launcher",
    name="embedlab",
    node={"_target_": "hydra_plugins.embedlab_launcher.EmbedlabLauncher", "parallel": None},
    provider="embedlab_launcher",
)
