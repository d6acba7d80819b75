//! Checks, before anything is computed, that the output files can be written.

use crate::RunError;
use crate::files::Place;
use frit_ir::plan::{DeviceType, layout};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Checks that files can be written under these names, each with its option, without leaving anything behind.
///
/// # Errors
/// The first that cannot be written, that two options name, or that is also read.
pub fn check(
    outputs: &[(&'static str, Option<&Path>)],
    read: &[(&'static str, &Path)],
) -> Result<(), RunError> {
    let mut known = Vec::new();
    for (option, path) in read {
        known.extend(Place::of(path).ok().map(|place| (*option, place)));
    }
    for (option, path) in outputs {
        let Some(path) = *path else { continue };
        let place = Place::of(path).map_err(RunError::output(option, path))?;
        let other = known.iter().find(|(_, p)| *p == place && matches!(p, Place::File(_)));
        if let Some((other, _)) = other {
            let reason = format!("is also the file of {other}; give another name");
            return Err(RunError::Output { option, path: path.into(), reason });
        }
        place.probe().map_err(RunError::output(option, path))?;
        known.push((option, place));
    }
    Ok(())
}

/// The files that a plan directory has and a run reads; none of another directory.
pub fn files_of(plan: &Path) -> Vec<PathBuf> {
    let kernels = [DeviceType::Cpu, DeviceType::Cuda].map(layout::kernels);
    let own = [layout::PLAN, layout::WEIGHTS, layout::REFERENCES, layout::PASS_TRACE];
    let own: Vec<&str> = own.into_iter().chain(kernels.iter().map(String::as_str)).collect();
    let source = [layout::CONFIGURATION, layout::ORIGIN, layout::ONNX_MODEL, layout::JSON_MODEL];
    let source = source.map(|name| plan.join(layout::SOURCE).join(name));
    let folders = [plan.to_path_buf(), plan.join(layout::EVALUATION)];
    let files = folders.iter().flat_map(|folder| own.iter().map(|name| folder.join(name)));
    files.chain(source).filter(|file| file.is_file()).collect()
}

/// Why a folder cannot be created, and what to do.
pub(crate) fn reason_of_folder(path: &Path, error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::AlreadyExists | ErrorKind::NotADirectory if path.is_file() => {
            "is a file; give the name of a folder".into()
        }
        ErrorKind::AlreadyExists if path.is_symlink() => {
            let to = path.read_link().unwrap_or_default();
            format!("is a symbolic link to {}, which does not exist; create it first", to.display())
        }
        _ => reason(path, error),
    }
}

/// Why a file cannot be written, and what to do.
pub(crate) fn reason(path: &Path, error: &std::io::Error) -> String {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match error.kind() {
        ErrorKind::IsADirectory => "is a directory; give the name of a file".into(),
        ErrorKind::NotFound if !folder.exists() => {
            format!("the directory {} does not exist; create it first", folder.display())
        }
        ErrorKind::PermissionDenied => "cannot be written: permission denied".into(),
        _ => format!("cannot be written: {error}"),
    }
}
