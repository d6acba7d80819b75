//! Names in a plan directory.

use super::DeviceType;

/// The plan.
pub const PLAN: &str = "plan.json";
/// Parameters and large constants.
pub const WEIGHTS: &str = "weights.safetensors";
/// Which parameters are read from the model's own files.
pub const REFERENCES: &str = "weights.json";
/// The folder of generated kernels.
pub const KERNELS: &str = "kernels";
/// The plan directory of the evaluation, within that of the training.
pub const EVALUATION: &str = "eval";
/// The graph after every pass.
pub const PASS_TRACE: &str = "passes.json.gz";
/// The folder of the model and its configuration, of which every checkpoint has a copy.
pub const SOURCE: &str = "source";
/// The resolved configuration, in [`SOURCE`].
pub const CONFIGURATION: &str = "train.toml";
/// Where the model came from, in [`SOURCE`].
pub const ORIGIN: &str = "origin.json";
/// An ONNX model without its parameters, in [`SOURCE`].
pub const ONNX_MODEL: &str = "model.onnx";
/// A JSON model, in [`SOURCE`].
pub const JSON_MODEL: &str = "model.json";

/// Measured choices of libraries and kernels of a plan for GPUs, which a run adds.
pub const TUNING: &str = "tuning.json";
/// The folder of compiled code of a plan for GPUs, which a run adds.
pub const CUBINS: &str = "cubins";

/// All names at the top of a plan directory.
pub const NAMES: [&str; 9] =
    [PLAN, WEIGHTS, REFERENCES, KERNELS, EVALUATION, PASS_TRACE, SOURCE, TUNING, CUBINS];

/// The file of the generated kernels for a device.
pub fn kernels(device: DeviceType) -> String {
    let file = if device == DeviceType::Cpu { "kernels.so" } else { "kernels.ptx" };
    format!("{KERNELS}/{file}")
}
