//! Compiles CUDA C++ with NVRTC to code for this GPU, so that the driver need not compile PTX.

use super::driver::Source;
use super::error::CudaError;
use super::library::{LibraryError, Wanted, functions};
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

functions! {
    /// NVRTC's functions.
    Api {
        nvrtcVersion: fn(*mut c_int, *mut c_int) -> u32,
        nvrtcGetErrorString: fn(u32) -> *const c_char,
        nvrtcCreateProgram: fn(*mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> u32,
        nvrtcDestroyProgram: fn(*mut nvrtcProgram) -> u32,
        nvrtcCompileProgram: fn(nvrtcProgram, c_int, *const *const c_char) -> u32,
        nvrtcGetProgramLogSize: fn(nvrtcProgram, *mut usize) -> u32,
        nvrtcGetProgramLog: fn(nvrtcProgram, *mut c_char) -> u32,
        nvrtcGetCUBINSize: fn(nvrtcProgram, *mut usize) -> u32,
        nvrtcGetCUBIN: fn(nvrtcProgram, *mut c_char) -> u32,
    }
}

/// The library, of the newest major version of CUDA that the driver supports.
pub(super) fn library(driver: (u32, u32)) -> Wanted {
    Wanted {
        what: "NVRTC",
        names: match driver.0 {
            12 => &["libnvrtc.so.12"],
            _ => &["libnvrtc.so.13", "libnvrtc.so.12"],
        },
        companion: Some("libnvrtc-builtins.so"),
        remedy: "install CUDA 12, or `pip install nvidia-cuda-nvrtc-cu12`",
    }
}

/// The compiler.
pub(super) struct Nvrtc {
    api: Api,
    /// Its path.
    pub(super) path: String,
    /// Its version.
    pub(super) version: (u32, u32),
}

impl Nvrtc {
    /// Loads it.
    ///
    /// # Errors
    /// If it is missing or too old.
    pub(super) fn open(driver: (u32, u32)) -> Result<Nvrtc, LibraryError> {
        let loaded = library(driver).load()?;
        let api = Api::of(&loaded)?;
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: the pointers are valid. A version that cannot be told is zero.
        unsafe { (api.nvrtcVersion)(&mut major, &mut minor) };
        Ok(Nvrtc { api, path: loaded.path, version: (major as u32, minor as u32) })
    }

    /// Name and version.
    pub(super) fn name(&self) -> String {
        format!("NVRTC {}.{}", self.version.0, self.version.1)
    }

    /// Compiles files in parallel on all cores.
    ///
    /// # Errors
    /// The compiler's message for the first refused source.
    pub(super) fn compile_all(
        &self,
        sources: &[Source<'_>],
        capability: (u32, u32),
    ) -> Result<Vec<Vec<u8>>, CudaError> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some((i, source)) = at(sources, next.fetch_add(1, Ordering::Relaxed)) {
                done.push((i, self.compile(source, capability)));
            }
            done
        };
        let mut all: Vec<(usize, Result<Vec<u8>, CudaError>)> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..cores.min(sources.len())).map(|_| scope.spawn(work)).collect();
            let join = |w: std::thread::ScopedJoinHandle<'_, _>| {
                w.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().flat_map(join).collect()
        });
        all.sort_by_key(|(i, _)| *i);
        all.into_iter().map(|(_, code)| code).collect()
    }

    /// Compiles a file with macros defined.
    fn compile(&self, source: &Source<'_>, capability: (u32, u32)) -> Result<Vec<u8>, CudaError> {
        let Source { file, text: source, defines } = *source;
        let refuse = |reason: String| CudaError::Compile {
            file: file.into(),
            compiler: self.name(),
            reason,
        };
        let text = |text: String| CString::new(text).map_err(|e| refuse(e.to_string()));
        let mut options = vec![
            text(format!("--gpu-architecture=sm_{}{}", capability.0, capability.1))?,
            text("--std=c++17".into())?,
        ];
        for (name, value) in defines {
            options.push(text(format!("-D{name}={value}"))?);
        }
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let (source, name) = (text(source.into())?, text(format!("{file}.cu"))?);
        let mut program = Program { api: &self.api, program: null_mut() };
        let said = |code: u32| match code {
            0 => Ok(()),
            // SAFETY: the text lives as long as the library.
            code => Err(refuse(unsafe { c_text((self.api.nvrtcGetErrorString)(code)) })),
        };
        // SAFETY: all texts end with a zero and outlive the calls; results have the sizes asked for.
        unsafe {
            let (source, name) = (source.as_ptr(), name.as_ptr());
            let made = &mut program.program;
            said((self.api.nvrtcCreateProgram)(made, source, name, 0, null(), null()))?;
            let n = options.len() as c_int;
            let compiled = (self.api.nvrtcCompileProgram)(program.program, n, options.as_ptr());
            if let Err(error) = said(compiled) {
                let log = program.log();
                return Err(if log.is_empty() { error } else { refuse(log) });
            }
            let mut size = 0;
            said((self.api.nvrtcGetCUBINSize)(program.program, &mut size))?;
            let mut code = vec![0_u8; size];
            said((self.api.nvrtcGetCUBIN)(program.program, code.as_mut_ptr().cast()))?;
            Ok(code)
        }
    }
}

/// An element with its index.
fn at<T>(items: &[T], i: usize) -> Option<(usize, &T)> {
    items.get(i).map(|item| (i, item))
}

struct Program<'a> {
    api: &'a Api,
    program: nvrtcProgram,
}

impl Program<'_> {
    /// The compiler's log; may be empty.
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program was created; the log has the size asked for.
        unsafe {
            if (self.api.nvrtcGetProgramLogSize)(self.program, &mut size) != 0 || size == 0 {
                return String::new();
            }
            let mut log = vec![0_u8; size];
            match (self.api.nvrtcGetProgramLog)(self.program, log.as_mut_ptr().cast()) {
                0 => c_text(log.as_ptr().cast()).trim().to_string(),
                _ => String::new(),
            }
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created, and not destroyed before.
            unsafe { (self.api.nvrtcDestroyProgram)(&mut self.program) };
        }
    }
}

/// Copies a string of a library.
///
/// # Safety
/// It must be null or end with a zero.
pub(super) unsafe fn c_text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by the contract of this function.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any driver: the test needs none.
    const ANY: (u32, u32) = (u32::MAX, 0);

    #[test]
    fn sources_become_code_of_the_device_and_errors_name_the_line() {
        let nvrtc = match Nvrtc::open(ANY) {
            Ok(nvrtc) => nvrtc,
            Err(e) => return eprintln!("SKIPPED: {e}"),
        };
        let text = "extern \"C\" __global__ void fill(float *x) { x[threadIdx.x] = VALUE; }";
        let values = [1, 2, 3].map(|i| [("VALUE".to_string(), format!("{i}.0f"))]);
        let sources: Vec<Source<'_>> =
            values.iter().map(|defines| Source { file: "fill", text, defines }).collect();
        let codes = nvrtc.compile_all(&sources, (9, 0)).unwrap();
        assert!(codes.len() == 3 && codes.iter().all(|code| code.starts_with(b"\x7fELF")));
        for (source, code) in sources.iter().zip(&codes) {
            assert_eq!(nvrtc.compile(source, (9, 0)).unwrap(), *code, "in order");
        }
        let broken = Source { file: "broken", text, defines: &[] };
        let error = nvrtc.compile_all(&[sources[0], broken], (9, 0)).unwrap_err().to_string();
        assert!(error.contains("broken.cu") && error.contains("VALUE"), "{error}");
        let error = nvrtc.compile_all(&sources, (1, 0)).unwrap_err().to_string();
        assert!(error.contains("architecture"), "{error}");
    }
}
