//! Clusters by name or from a TOML file.

use crate::config::Config;
use crate::diagnostics::Report;
use frit_ir::plan::Target;
use frit_ir::{Code, Diagnostic};
use frit_passes::cost::{Cluster, cluster};
use std::path::Path;

/// The cluster for which the durations in a plan are predicted.
///
/// # Errors
/// If the configuration names one that cannot be read.
pub fn of(config: &Config, target: &Target) -> Result<Cluster, Report> {
    match config.target.cluster.as_str() {
        "auto" => Ok(Cluster::of(target)),
        name => read(name),
    }
}

/// A built-in cluster by name, or the one that a file describes.
///
/// # Errors
/// If there is neither, or the file is not one.
pub fn read(name: &str) -> Result<Cluster, Report> {
    if let Some(cluster) = Cluster::named(name) {
        return Ok(cluster);
    }
    let known = cluster::NAMES.join(", ");
    let path = Path::new(name);
    let text = std::fs::read_to_string(path).map_err(|e| {
        Diagnostic::error(
            Code::PlanUnreadable,
            format!("cannot read the cluster {}: {e}", path.display()),
        )
        .help(format!("give a TOML file or one of {known}"))
    })?;
    let refuse = |e: String| {
        Diagnostic::error(Code::ClusterInvalid, format!("{}: {}", path.display(), e.trim_end()))
            .help(format!("start from a built-in cluster: base = \"h100\" (one of {known})"))
    };
    let mut table: toml::Table =
        text.parse().map_err(|e: toml::de::Error| refuse(e.message().into()))?;
    if let Some(base) = table.remove("base") {
        let named = base.as_str().and_then(Cluster::named);
        let named = named.ok_or_else(|| refuse(format!("unknown base {base}")))?;
        let mut whole = toml::Table::try_from(named).map_err(|e| refuse(e.to_string()))?;
        overlay(&mut whole, table);
        table = whole;
    }
    let cluster: Cluster =
        table.try_into().map_err(|e: toml::de::Error| refuse(e.message().into()))?;
    match cluster.defect() {
        Some(defect) => Err(refuse(defect).into()),
        None => Ok(cluster),
    }
}

/// Replaces in `whole` what `part` names, table by table.
fn overlay(whole: &mut toml::Table, part: toml::Table) {
    for (key, value) in part {
        match (whole.get_mut(&key), value) {
            (Some(toml::Value::Table(inner)), toml::Value::Table(part)) => overlay(inner, part),
            (Some(toml::Value::Float(x)), toml::Value::Integer(i)) => *x = i as f64,
            (_, value) => {
                whole.insert(key, value);
            }
        }
    }
}
