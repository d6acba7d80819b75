//! Checks, before anything is computed, that the output files can be written.

use crate::RunError;
use crate::files::Place;
use std::io::ErrorKind;
use std::path::Path;

/// Checks that files can be written under these names, each with its option, without leaving anything behind.
///
/// # Errors
/// The first that cannot be written, that two options name, or that is also read.
pub(crate) fn check(
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
