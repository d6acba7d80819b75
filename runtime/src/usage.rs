//! Reports the device resources that a run used, as JSON.

use crate::RunError;
use crate::files;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The device resources that a rank uses.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Usage {
    /// The device by its name; `cpu`.
    pub device: String,
    /// Bytes of the plan's persistent arena.
    pub persistent_bytes: usize,
    /// Bytes of the plan's workspace arena.
    pub workspace_bytes: usize,
    /// Bytes of the plan's arena in host memory.
    pub host_bytes: usize,
    /// Bytes outside the arenas: scratch memory of launches, GEMM workspaces, data in transit.
    pub extra_bytes: usize,
    /// Bytes of device memory used by all programs and libraries; absent on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<usize>,
    /// Commands enqueued per step, by kind.
    pub launches: BTreeMap<&'static str, usize>,
    /// Launches of captured graphs in such a step; absent where there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph_launches: Option<usize>,
}

/// Writes it.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn write(path: &Path, usage: &Usage) -> Result<(), RunError> {
    let text = serde_json::to_string_pretty(usage).unwrap_or_default() + "\n";
    files::deliver(path, |out| out.write_all(text.as_bytes())).map_err(RunError::io(path))
}
