//! Loads NVIDIA's shared libraries from `FRIT_CUDA_PATH`, the dynamic linker's path, or the Python wheels that PyTorch
//! installs, in this order.
//!
//! The loaders of the bindings panic on a missing library or symbol, and do not know NCCL's file name or wheels; so all
//! functions of a library are resolved here, and anything missing is one error.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::c_void;
#[cfg(target_os = "linux")]
use std::ffi::{CStr, OsStr, c_char};
#[cfg(target_os = "linux")]
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The variable with additional directories, separated by colons.
pub const PATH_VARIABLE: &str = "FRIT_CUDA_PATH";

/// Why a library cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// It is not found.
    #[error(
        "{what} is not found: searched for {names} in {PATH_VARIABLE}, on the path of the dynamic linker \
         (LD_LIBRARY_PATH), and in the Python wheels of {places}; {remedy}"
    )]
    Missing {
        /// What it is.
        what: &'static str,
        /// The file names.
        names: String,
        /// The directories with Python packages.
        places: String,
        /// What to do.
        remedy: &'static str,
    },
    /// It exists, but cannot be loaded.
    #[error("{path} cannot be loaded: {reason}")]
    Broken {
        /// The file.
        path: String,
        /// The dynamic linker's message.
        reason: String,
    },
    /// It lacks a function.
    #[error("{path} is too old: it has no `{symbol}`; {remedy}")]
    TooOld {
        /// The file.
        path: String,
        /// The function.
        symbol: &'static str,
        /// What to do.
        remedy: &'static str,
    },
}

/// A library to search for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// What it is.
    pub what: &'static str,
    /// File names, best first.
    pub names: &'static [&'static str],
    /// A library in the same directory to be loaded first, by the prefix of its name.
    pub companion: Option<&'static str>,
    /// What to do if it is missing or too old.
    pub remedy: &'static str,
}

/// A loaded library. It stays loaded until the process ends, because CUDA's libraries do not support unloading.
#[derive(Debug)]
pub struct Loaded {
    /// Where it was found.
    pub path: String,
    wanted: Wanted,
    library: &'static Library,
}

impl Wanted {
    /// Loads it.
    ///
    /// # Errors
    /// If it is not found, or cannot be loaded.
    pub fn load(&self) -> Result<Loaded, LibraryError> {
        let variable = |name: &str| std::env::var(name).ok();
        self.load_from(&named(variable), &known(variable))
    }

    /// Loads it from directories that the user `named`, from where the dynamic linker looks, or from those that are
    /// `known` to have it: of the user's any version before a better one from elsewhere.
    fn load_from(&self, named: &[PathBuf], known: &[PathBuf]) -> Result<Loaded, LibraryError> {
        let within = |directories: &[PathBuf], name: &str| -> Vec<PathBuf> {
            directories.iter().map(|d| d.join(name)).filter(|p| p.exists()).collect()
        };
        let users = self.names.iter().flat_map(|name| within(named, name));
        let others = self
            .names
            .iter()
            .flat_map(|name| std::iter::once(PathBuf::from(name)).chain(within(known, name)));
        let mut broken = None;
        for path in users.chain(others) {
            if let Some(companion) = self.companion {
                load_companions(&path, companion);
            }
            match open(&path) {
                Ok((library, place)) => {
                    let path = place.unwrap_or(path).display().to_string();
                    return Ok(Loaded { path, wanted: *self, library });
                }
                Err(e) if path.components().count() > 1 => {
                    let (path, reason) = (path.display().to_string(), e.to_string());
                    broken = broken.or(Some(LibraryError::Broken { path, reason }));
                }
                Err(_) => {}
            }
        }
        Err(broken.unwrap_or_else(|| LibraryError::Missing {
            what: self.what,
            names: self.names.join(", "),
            places: python_packages(|name| std::env::var(name).ok())
                .iter()
                .map(|p| p.display().to_string())
                .collect::<Vec<_>>()
                .join(", "),
            remedy: self.remedy,
        }))
    }
}

impl Loaded {
    /// The address of a function.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to this function.
    ///
    /// # Errors
    /// If the library lacks it.
    pub unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, LibraryError> {
        // SAFETY: by the contract of this function.
        match unsafe { self.library.get::<F>(symbol.as_bytes()) } {
            Ok(function) => Ok(*function),
            Err(_) => {
                let (path, remedy) = (self.path.clone(), self.wanted.remedy);
                Err(LibraryError::TooOld { path, symbol, remedy })
            }
        }
    }
}

/// Opens a library for good; beside it the file that it is, without links: its name may tell its version.
fn open(path: &Path) -> Result<(&'static Library, Option<PathBuf>), libloading::Error> {
    // SAFETY: NVIDIA's libraries may be loaded at any time, and are never unloaded.
    let handle = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }?.into_raw();
    let place = place(handle).and_then(|p| p.canonicalize().ok());
    // SAFETY: the handle was just opened, and is not used elsewhere.
    Ok((Box::leak(Box::new(unsafe { Library::from_raw(handle) })), place))
}

/// The file of an open library.
#[cfg(target_os = "linux")]
fn place(handle: *mut c_void) -> Option<PathBuf> {
    /// The beginning of `struct link_map`.
    #[repr(C)]
    struct LinkMap {
        address: usize,
        name: *const c_char,
    }
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: the handle is open; the request writes a pointer, whose target lives as long as the library does.
    let name = unsafe {
        match libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) {
            0 if !map.is_null() && !(*map).name.is_null() => CStr::from_ptr((*map).name),
            _ => return None,
        }
    };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

#[cfg(not(target_os = "linux"))]
fn place(_: *mut c_void) -> Option<PathBuf> {
    None
}

/// Loads the libraries beside `path` with this prefix, so that a library that opens them by name finds them.
fn load_companions(path: &Path, prefix: &str) {
    let Some(Ok(entries)) = path.parent().map(std::fs::read_dir) else { return };
    let named = |e: &std::fs::DirEntry| e.file_name().to_string_lossy().starts_with(prefix);
    for entry in entries.flatten().filter(named) {
        // A failure is reported by the library that needs it.
        let _ = open(&entry.path());
    }
}

/// Directories that the user names.
fn named(variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    variable(PATH_VARIABLE).iter().flat_map(std::env::split_paths).collect()
}

/// Directories that may contain NVIDIA's libraries, besides those of the dynamic linker.
fn known(variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let mut all = vec![];
    for packages in python_packages(&variable) {
        let mut wheels: Vec<PathBuf> = entries(&packages.join("nvidia"));
        wheels.sort();
        all.extend(wheels.into_iter().map(|wheel| wheel.join("lib")).filter(|lib| lib.is_dir()));
    }
    all.push("/usr/local/cuda/lib64".into());
    all
}

/// Directories with Python packages, those of the active environment first.
fn python_packages(variable: impl Fn(&str) -> Option<String>) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(|name| variable(name).map(PathBuf::from))
        .collect();
    for bin in variable("PATH").iter().flat_map(std::env::split_paths) {
        if bin.join("python3").exists() {
            prefixes.extend(bin.parent().map(Path::to_path_buf));
        }
    }
    let home = variable("HOME");
    let pyenv = variable("PYENV_ROOT").or(home.as_ref().map(|home| format!("{home}/.pyenv")));
    prefixes.extend(pyenv.iter().flat_map(|root| entries(&Path::new(root).join("versions"))));
    prefixes.extend(home.map(|home| Path::new(&home).join(".local")));
    prefixes.extend(["/usr/local".into(), "/usr".into()]);
    let mut all: Vec<PathBuf> =
        variable("PYTHONPATH").iter().flat_map(std::env::split_paths).collect();
    for prefix in prefixes {
        let mut versions = entries(&prefix.join("lib"));
        versions.sort();
        for version in versions.iter().rev() {
            let python =
                version.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3"));
            for packages in ["site-packages", "dist-packages"].map(|name| version.join(name)) {
                if python && packages.is_dir() {
                    all.push(packages);
                }
            }
        }
    }
    // A directory may have several paths, such as `/lib` and `/usr/lib`.
    let mut seen = std::collections::HashSet::new();
    all.retain(|packages| {
        seen.insert(packages.canonicalize().unwrap_or_else(|_| packages.clone()))
    });
    all
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return vec![] };
    entries.flatten().map(|e| e.path()).collect()
}

/// A structure of a library's functions, and a function that resolves all of them.
macro_rules! functions {
    ($(#[$meta:meta])* $name:ident { $($(#[$attribute:meta])* $symbol:ident: fn($($argument:ty),*) -> $result:ty,)* }) => {
        $(#[$meta])*
        #[expect(non_snake_case, reason = "named as the library names them")]
        pub(super) struct $name {
            $($(#[$attribute])* pub(super) $symbol: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl $name {
            /// Resolves every function.
            fn of(
                loaded: &$crate::library::Loaded,
            ) -> std::result::Result<Self, $crate::library::LibraryError> {
                Ok($name {
                    $(
                        // SAFETY: the type is that of the library's header.
                        $symbol: unsafe { loaded.function(stringify!($symbol))? },
                    )*
                })
            }
        }
    };
}
pub(super) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted = Wanted {
        what: "libfrit-test",
        names: &["libfrit-test.so.13", "libfrit-test.so.12"],
        companion: None,
        remedy: "install it",
    };

    #[test]
    fn a_missing_library_is_one_error_that_says_where_it_was_looked_for() {
        let error = WANTED.load_from(&[], &[]).unwrap_err().to_string();
        for part in ["libfrit-test.so.13, libfrit-test.so.12", PATH_VARIABLE, "install it"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_file_that_is_no_library_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libfrit-test.so.12"), "no ELF").unwrap();
        let error = WANTED.load_from(&[dir.path().into()], &[]).unwrap_err().to_string();
        assert!(error.contains("libfrit-test.so.12 cannot be loaded"), "{error}");
    }

    #[test]
    fn a_missing_function_is_named() {
        let c = Wanted { names: &["libc.so.6"], ..WANTED };
        let loaded = c.load_from(&[], &[]).unwrap();
        // SAFETY: the function is not called.
        let error =
            unsafe { loaded.function::<extern "C" fn()>("frit_no_such_function") }.unwrap_err();
        let error = error.to_string();
        let expected = " is too old: it has no `frit_no_such_function`; install it";
        assert!(error.contains("libc") && error.ends_with(expected), "{error}");
    }

    #[test]
    fn wheels_of_the_active_environment_are_searched_before_the_systems() {
        let dir = tempfile::tempdir().unwrap();
        let lib =
            |part: &str| dir.path().join(part).join("lib/python3.12/site-packages/nvidia/nccl/lib");
        for part in ["active", "home/.local"] {
            std::fs::create_dir_all(lib(part)).unwrap();
        }
        let path = |part: &str| Some(dir.path().join(part).display().to_string());
        let found = known(|name| match name {
            "VIRTUAL_ENV" => path("active"),
            "HOME" => path("home"),
            _ => None,
        });
        assert_eq!(found[..2], [lib("active"), lib("home/.local")]);
    }
}
