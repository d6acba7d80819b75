//! Supported versions of ONNX's default operator set.

use super::messages::ModelProto;
use crate::diagnostics::Report;
use frit_ir::{Code, Diagnostic};
use std::ops::RangeInclusive;

/// Versions whose operators are all read with their own meaning.
pub const SUPPORTED: RangeInclusive<i64> = 1..=27;

/// The version of the default operator set that the model is written in.
pub(super) fn of(model: &ModelProto) -> Result<i64, Report> {
    let default = |d: &str| d.is_empty() || d == "ai.onnx";
    // Of several entries the last one counts, as for onnxruntime.
    let mut entries = model.opset_import.iter().rev().filter(|o| default(&o.domain));
    let version = entries.next().map(|o| o.version);
    let range = format!("opsets {} to {}", SUPPORTED.start(), SUPPORTED.end());
    match version {
        None => Err(Diagnostic::error(
            Code::OpsetUnsupported,
            "the model does not say which ONNX opset it is in",
        )
        .help(format!("export it again; {range} are supported"))
        .into()),
        Some(version) if SUPPORTED.contains(&version) => Ok(version),
        Some(version) => Err(Diagnostic::error(
            Code::OpsetUnsupported,
            format!("the model is in ONNX opset {version}; {range} are supported"),
        )
        .help("export it with `opset_version=18`, or convert it with `onnx.version_converter`")
        .into()),
    }
}
