"""Names of Accelerate that Leyden lacks: importing one raises an error that names the alternative."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

BIG_MODELS = (
    "Leyden has no inference of models that exceed a device's memory. Use transformers' from_pretrained(..., "
    "device_map='auto') for that. To train one, use strategy='fsdp' with configure_model or from_pretrained "
    "(docs/fsdp.md), or DeepSpeed's stage 3"
)
ON_META = (
    "use `with torch.device('meta'):`, or the Trainer's configure_model, which builds on it if the strategy shards"
)

# Alternative -> the names that it replaces, separated by spaces.
INSTEAD = {
    BIG_MODELS: (
        "load_checkpoint_and_dispatch load_checkpoint_in_model infer_auto_device_map dispatch_model cpu_offload "
        "cpu_offload_with_hook disk_offload get_balanced_memory get_max_memory get_max_layer_size "
        "compute_module_sizes check_device_map offload_state_dict offload_weight load_offloaded_weight "
        "load_offloaded_weights save_offload_index OffloadedWeightsLoader PrefixedDataset set_module_tensor_to_device "
        "has_offloaded_params align_module_device extract_submodules_state_dict find_tied_parameters retie_parameters "
        "named_module_tensors dtype_byte_size convert_file_size_to_int id_tensor_storage "
        "check_tied_parameters_in_config check_tied_parameters_on_same_device AlignDevicesHook "
        "attach_execution_device_hook attach_align_device_hook attach_align_device_hook_on_blocks CpuOffload "
        "UserCpuOffloadHook generate_device_map check_device_same "
        "get_non_persistent_buffers compute_module_total_buffer_size clean_device_map get_module_leaves "
        "get_module_size_with_ties fallback_allocate get_state_dict_offloaded_model get_state_dict_from_offload"
    ),
    ON_META: "init_empty_weights init_on_device",
    "quantize with transformers' from_pretrained(..., quantization_config=BitsAndBytesConfig(…)), or torchao": (
        "BnbQuantizationConfig load_and_quantize_model has_4bit_bnb_layers"
    ),
    "use your own model and data; accelerator.pipeline_step(model, batch, step=…) runs your own step": (
        "MegatronLMDummyDataLoader AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep "
        "add_model_config_to_megatron_parser"
    ),
    "Accelerator(strategy=MeshStrategy(pp=…)).prepare(model) splits a model into stages, also for evaluation": (
        "prepare_pippy build_pipeline pippy_forward find_pippy_batch_size"
    ),
    "context parallelism and Ulysses are not part of this version; ParallelismConfig(tp_size=…) splits layers": (
        "TorchContextParallelConfig DeepSpeedSequenceParallelConfig"
    ),
    "read accelerator.parallelism_config.tp_size": "get_model_tp_size",
    "use accelerator.prepare_data_loader(loader)": (
        "prepare_data_loader DataLoaderShard DataLoaderDispatcher DataLoaderAdapter DataLoaderStateMixin "
        "BatchSamplerShard IterableDatasetShard SkipBatchSampler SkipDataLoader get_sampler"
    ),
    "Accelerator(log_with=…) finds trackers automatically": (
        "filter_trackers get_available_trackers register_tracker_class LOGGER_TYPE_TO_CLASS"
    ),
    "use `leyden merge <checkpoint> <folder>`": "merge_fsdp_weights",
    "use accelerator.save_state and load_state, whose checkpoints load on any number of ranks": (
        "save_fsdp_model save_fsdp_optimizer load_fsdp_model load_fsdp_optimizer fsdp2_load_full_state_dict"
    ),
    "use accelerator.save_model and safetensors.torch.load_file": (
        "load_state_dict load clean_state_dict_for_safetensors"
    ),
    "use dynamo_backend or a TorchDynamoPlugin, or FSDPStrategy(compile=True) to compile block by block": (
        "compile_regions compile_regions_deepspeed compile_regions_fsdp2 has_compiled_regions is_compiled_module"
    ),
    "use mixed_precision='fp8' with kwargs_handlers=[AORecipeKwargs()] or [TERecipeKwargs()]": (
        "convert_model convert_model_to_fp8_ao apply_fp8_autowrap contextual_fp8_autocast "
        "filter_first_and_last_linear_layers has_transformer_engine_layers has_ao_layers"
    ),
    "use accelerator.autocast(), and read accelerator.scaler": (
        "get_mixed_precision_context_manager get_grad_scaler get_fsdp2_grad_scaler"
    ),
    "use `with deepspeed.zero.GatheredParameters(…):`": "GatheredParameters",
    "use `leyden launch --enable_cpu_affinity`": "set_numa_affinity",
    "use `leyden config default`": "write_basic_config",
    "use `leyden launch` or torchrun": (
        "PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs "
        "prepare_simple_launcher_cmd_env prepare_tpu install_xla test_launch SageMakerDistributedType "
        "ComputeEnvironment is_port_in_use check_os_kernel TORCH_LAUNCH_PARAMS"
    ),
    "use unittest.mock.patch.dict(os.environ, …)": "patch_environment clear_environment purge_accelerate_environment",
    "use torch.utils._pytree.tree_map": (
        "recursively_apply honor_type is_namedtuple is_torch_tensor is_tensor_information TensorInformation "
        "get_data_structure initialize_tensors find_device slice_tensors concatenate pad_input_tensors "
        "copy_tensor_to_devices listify calculate_maximum_sizes CannotPadNestedTensorWarning"
    ),
    "compare with packaging.version": "compare_versions is_torch_version",
    "read os.environ": (
        "get_int_from_env parse_flag_from_env parse_choice_from_env str_to_bool convert_dict_to_env_variables "
        "are_libraries_initialized"
    ),
    "use torch.cuda, torch.backends or torch.accelerator": (
        "is_bf16_available is_fp16_available is_fp8_available check_cuda_fp8_capability check_cuda_p2p_ib_support "
        "get_gpu_info get_current_device_type get_cpu_distributed_information is_rocm_available is_habana_gaudi1 "
        "is_xccl_available"
    ),
    "use importlib.util.find_spec(package)": (
        "is_4bit_bnb_available is_8bit_bnb_available is_bitsandbytes_multi_backend_available is_amdsmi_available "
        "is_lomo_available is_pippy_available is_sagemaker_available is_import_timer_available "
        "is_weights_only_available deepspeed_required torchao_required is_torchdata_stateful_dataloader_available "
        "is_transformer_engine_mxfp8_available"
    ),
    "save_state uses other file names (docs/checkpoints.md)": (
        "MODEL_NAME OPTIMIZER_NAME SCHEDULER_NAME SAMPLER_NAME SCALER_NAME RNG_STATE_NAME PROFILE_PATTERN_NAME "
        "WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_PATTERN_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME "
        "SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_PATTERN_NAME"
    ),
    "use synchronize_rng_states([kind])": "synchronize_rng_state",
    "use convert_to_fp32; a prepared model's outputs are float32 already": (
        "convert_outputs_to_fp32 ConvertOutputsToFp32"
    ),
    "use find_batch_size": "ignorant_find_batch_size",
    "leave it out: from_pretrained reads the weights on every rank": (
        "enable_fsdp_ram_efficient_loading disable_fsdp_ram_efficient_loading ensure_weights_retied"
    ),
    "use accelerator.prepare with an fsdp_plugin": (
        "fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_prepare_model fsdp2_switch_optimizer_parameters "
        "model_has_dtensor get_module_children_bottom_up"
    ),
    "use isinstance(model, peft.PeftModel)": "is_peft_model",
    "use operator.attrgetter": "recursive_getattr",
    "use torch.distributed.is_initialized(), or PartialState().use_distributed": "is_initialized",
    "use torch's hooks: module.register_forward_pre_hook and register_forward_hook": (
        "ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules "
        "LayerwiseCastingHook"
    ),
    "use accelerator.save_state, load_state and register_for_checkpointing": (
        "save_accelerator_state load_accelerator_state save_custom_state load_custom_state"
    ),
    "use release_memory, which empties the device's cache": "clear_device_cache",
    "use find_executable_batch_size, which recognizes out-of-memory errors": "should_reduce_batch_size",
    "DeepSpeed's engine is accelerator.strategy.engine, and its plugin accelerator.deepspeed_plugin": (
        "map_pytorch_optim_to_deepspeed get_active_deepspeed_plugin HfDeepSpeedConfig DeepSpeedEngineWrapper "
        "DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper"
    ),
    "write the values out; docs/from-accelerate.md lists those of each argument": (
        "FSDP_SHARDING_STRATEGY FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE FSDP_MODEL_NAME "
        "TORCH_DYNAMO_MODES DEEPSPEED_MULTINODE_LAUNCHERS FP8BackendType CustomDtype BaseEnum EnumWithContains"
    ),
    "write your own line of code": (
        "convert_bytes merge_dicts get_pretty_name get_free_port has_repeated_blocks is_repeated_blocks "
        "get_module_class_from_name"
    ),
    "use PartialState().default_device.type": "torch_device get_backend",
    "use torch.cuda or torch.accelerator": "device_count memory_allocated_func",
    "decorate the test with pytest.mark.skipif(not torch.cuda.is_available(), reason=…)": "slow require_",
    "write your own test helper; `leyden test` checks an installation": (
        "RegressionDataset RegressionModel are_the_same_tensors assert_exception capture_call_output run_first "
        "execute_subprocess_async get_launch_command DEFAULT_LAUNCH_COMMAND get_torch_dist_unique_port run_command "
        "path_in_accelerate_package pytest_xdist_worker_id AccelerateTestCase MockingTestCase TempDirTestCase "
        "SubprocessCallException"
    ),
    "debug mode (LEYDEN_DEBUG=1) checks collectives, and gather reports mismatched shapes": (
        "DistributedOperationException verify_operation chained_operation gather_tensor_shape get_shape"
    ),
}
PACKAGES = (
    "aim bnb boto3 clearml comet_ml datasets deepspeed dvclive matplotlib megatron_lm mlflow msamp pandas peft pynvml "
    "pytest rich schedulefree swanlab tensorboard timm torch_xla torchao torchdata torchvision trackio "
    "transformer_engine transformers triton wandb"
)
"""Accelerate's words in `is_<word>_available`: package names, except bnb."""
HOMES = tuple(
    f"leyden{name}"
    for name in ("", ".utils", ".state", ".data_loader", ".logging", ".optimizer", ".scheduler", ".tracking")
)
DEVICES = ("cuda", "mps", "xpu", "npu", "mlu", "musa", "hpu", "sdaa", "neuron")


def lacking(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module with Accelerate's names; see `attribute`."""
    return functools.partial(attribute, module)


def attribute(module: str, name: str) -> Any:
    """Resolves a name that a module with Accelerate's names does not define.

    Args:
        module: name of the module, such as `leyden.utils`.
        name: the missing name.

    Returns:
        The object of that name in another of these modules, since Accelerate's modules import from each other; a
        working function for `is_<package>_available` and `is_<device>_available`.

    Raises:
        ImportError: for a name that Accelerate has, with the alternative. (An import statement drops the message of an
            AttributeError.)
        AttributeError: for all other names.
    """
    for home in HOMES if module != "leyden" else ():
        if name in importlib.import_module(home).__all__:
            return getattr(importlib.import_module(home), name)
    if name.startswith("is_") and name.endswith("_available"):
        subject = name.removeprefix("is_").removesuffix("_available")
        if subject in PACKAGES.split():
            return functools.partial(_is_installed, "bitsandbytes" if subject == "bnb" else subject)
        if subject in DEVICES:
            return functools.partial(_has_device, subject)
    listed = "require_" if name.startswith("require_") else name
    for instead, names in INSTEAD.items():
        if listed in names.split():
            raise ImportError(f"{module} does not have Accelerate's {name}: {instead}.", name=name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _has_device(kind: str) -> bool:
    import torch

    backend = getattr(torch, kind, None) if kind != "mps" else torch.backends.mps
    return bool(backend is not None and backend.is_available())
