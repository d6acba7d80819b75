//! Cache of compiled CUDA C++: `cubins/` beside the plan or, for all plans, the directory `FRIT_CUDA_CACHE`.
//!
//! A file is named by the hash of all inputs of the compilation, and ends with the hash of its code, so that an incomplete
//! file is detected and ignored.

use frit_cuda::CudaError;
use frit_cuda::driver::{Driver, Source};
use frit_ir::plan::{layout, sha256_hex};
use std::path::{Path, PathBuf};

/// The variable with a directory for the compiled code of all plans.
pub const CACHE_VARIABLE: &str = "FRIT_CUDA_CACHE";
/// Bytes of a hash as text.
const HASH_BYTES: usize = 64;

/// The directory.
pub(super) struct Cubins {
    folder: PathBuf,
}

impl Cubins {
    /// The directory from the environment, else that of the plan.
    pub(super) fn of(plan: &Path) -> Cubins {
        let shared = std::env::var_os(CACHE_VARIABLE).filter(|path| !path.is_empty());
        Cubins { folder: shared.map_or_else(|| plan.join(layout::CUBINS), PathBuf::from) }
    }

    /// The code of each source. Sources without a file are compiled in parallel and stored, unless the directory is not
    /// writable.
    ///
    /// # Errors
    /// A source that cannot be compiled.
    pub(super) fn code(
        &self,
        driver: &impl Driver,
        sources: &[Source<'_>],
    ) -> Result<Vec<Vec<u8>>, CudaError> {
        if sources.is_empty() {
            return Ok(vec![]);
        }
        let compiler = driver.compiler();
        let paths: Vec<PathBuf> =
            sources.iter().map(|s| self.folder.join(file_name(&compiler, s))).collect();
        let mut codes: Vec<Option<Vec<u8>>> = paths.iter().map(|path| read(path)).collect();
        let missing: Vec<usize> = (0..sources.len()).filter(|i| codes[*i].is_none()).collect();
        if !missing.is_empty() {
            let wanted: Vec<Source<'_>> = missing.iter().map(|i| sources[*i]).collect();
            for (i, code) in missing.into_iter().zip(driver.compile(&wanted)?) {
                write(&paths[i], &code);
                codes[i] = Some(code);
            }
        }
        Ok(codes.into_iter().flatten().collect())
    }
}

/// Names a file by the inputs of its code.
fn file_name(compiler: &str, source: &Source<'_>) -> String {
    let Source { file, text, defines } = source;
    let all = format!("{compiler}\n{file}\n{defines:?}\n{text}");
    format!("{file}-{}.cubin", &sha256_hex(all.as_bytes())[..32])
}

/// The code in a file, if it is complete.
pub(super) fn read(path: &Path) -> Option<Vec<u8>> {
    let mut code = std::fs::read(path).ok()?;
    let hash = code.split_off(code.len().checked_sub(HASH_BYTES)?);
    (sha256_hex(&code).as_bytes() == hash).then_some(code)
}

/// Writes a file atomically: other ranks may write the same one.
pub(super) fn write(path: &Path, code: &[u8]) {
    let aside = path.with_extension(format!("partial-{}", std::process::id()));
    let all = [code, sha256_hex(code).as_bytes()].concat();
    let written = path
        .parent()
        .map_or(Ok(()), std::fs::create_dir_all)
        .and_then(|()| std::fs::write(&aside, all))
        .and_then(|()| std::fs::rename(&aside, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&aside);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use frit_cuda::recording::{Call, Recording};

    fn compiled(driver: &Recording) -> Vec<String> {
        let name = |call| if let Call::Compile(name) = call { Some(name) } else { None };
        driver.take().into_iter().filter_map(name).collect()
    }

    #[test]
    fn code_is_kept_by_what_it_was_made_from() {
        let folder = tempfile::tempdir().unwrap();
        let cubins = Cubins { folder: folder.path().join("deep").join("cubins") };
        let [one, two] = ["float", "double"].map(|t| [("T".to_string(), t.to_string())]);
        let source = |text, defines| Source { file: "fill", text, defines };
        let sources = [source("a", &one), source("a", &two), source("b", &one)];
        let driver = Recording::new((9, 0));
        let codes = cubins.code(&driver, &sources).unwrap();
        assert_eq!(compiled(&driver).len(), 3);
        assert_eq!(cubins.code(&driver, &sources).unwrap(), codes);
        assert!(compiled(&driver).is_empty(), "all of it is known");
        // Another architecture, and a truncated file.
        let old = Recording::new((8, 0));
        cubins.code(&old, &sources[..1]).unwrap();
        assert_eq!(compiled(&old), ["fill T=float"]);
        let path = cubins.folder.join(file_name(&driver.compiler(), &sources[1]));
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[1..]).unwrap();
        assert_eq!(cubins.code(&driver, &sources).unwrap(), codes);
        assert_eq!(compiled(&driver), ["fill T=double"]);
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }

    #[test]
    fn a_directory_that_cannot_be_written_keeps_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let cubins = Cubins { folder: file.join("cubins") };
        let driver = Recording::new((9, 0));
        let sources = [Source { file: "fill", text: "a", defines: &[] }];
        for _ in 0..2 {
            assert_eq!(cubins.code(&driver, &sources).unwrap().len(), 1);
            assert_eq!(compiled(&driver).len(), 1);
        }
    }
}
