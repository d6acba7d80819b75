//! NVRTC: CUDA C++ to code of this GPU, so that no driver has to translate it.

use super::error::CudaError;
use super::library::{LibraryError, Wanted, functions};
use cudarc::nvrtc::sys::nvrtcProgram;
use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};

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

/// The library: of the newest major version of CUDA that the driver supports.
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
    /// Where it is.
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

    /// Compiles a file with macros defined.
    ///
    /// # Errors
    /// What the compiler says.
    pub(super) fn compile(
        &self,
        file: &str,
        source: &str,
        defines: &[(&str, String)],
        capability: (u32, u32),
    ) -> Result<Vec<u8>, CudaError> {
        let refuse = |reason: String| CudaError::Compile {
            file: file.into(),
            compiler: format!("NVRTC {}.{}", self.version.0, self.version.1),
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

struct Program<'a> {
    api: &'a Api,
    program: nvrtcProgram,
}

impl Program<'_> {
    /// What the compiler said, empty if it said nothing.
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

/// A text of a library.
///
/// # Safety
/// It is null or ends with a zero.
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

    /// Any driver: where there is none, the code is compiled all the same.
    const ANY: (u32, u32) = (u32::MAX, 0);

    #[test]
    fn sources_become_code_of_the_device_and_errors_name_the_line() {
        let nvrtc = match Nvrtc::open(ANY) {
            Ok(nvrtc) => nvrtc,
            Err(e) => return eprintln!("SKIPPED: {e}"),
        };
        let source = "extern \"C\" __global__ void fill(float *x) { x[threadIdx.x] = VALUE; }";
        let defines = [("VALUE", "1.0f".to_string())];
        let code = nvrtc.compile("fill", source, &defines, (9, 0)).unwrap();
        assert_eq!(&code[..4], b"\x7fELF");
        let error = nvrtc.compile("fill", source, &[], (9, 0)).unwrap_err().to_string();
        assert!(error.contains("fill.cu") && error.contains("VALUE"), "{error}");
        let error = nvrtc.compile("fill", source, &defines, (1, 0)).unwrap_err().to_string();
        assert!(error.contains("architecture"), "{error}");
    }
}
