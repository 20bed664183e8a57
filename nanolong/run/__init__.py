"""A run: its folder, lock, checkpoints and log, and what opens, resumes, saves and releases it."""

from nanolong.run.checkpoint import (
    find_checkpoint,
    goes_on,
    is_elastic_restart,
    is_resumed,
    load_optimizers,
    load_weights,
    open_model,
    read_meta,
    save_model,
    saved_settings,
    settings_record,
    weights_hash,
)
from nanolong.run.folder import latest_run, list_steps
from nanolong.run.logger import device_name, print_header, sum_by_source
from nanolong.run.opening import (
    begin_run,
    check_processes_agree,
    check_same_settings,
    existing_run,
    ignore_overwrite_of_preset,
    is_finished,
    load_resumed,
    lock_run,
    open_dataset,
    open_run,
    prepare_dataset,
    prune_finished_run,
    release_folder,
    release_run,
    replace_run,
)
from nanolong.run.saving import divergence_error, record_evaluation, report_end, save
from nanolong.run.signals import catch_signals
