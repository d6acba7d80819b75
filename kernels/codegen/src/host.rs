//! The CPU target: its description, object code for it, and linking into a shared object.

use crate::error::CodegenError;
use crate::llvm::{self, FileType, Target};
use crate::mlir::Mlir;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A CPU to compile for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTarget {
    /// LLVM triple.
    pub triple: String,
    /// LLVM's name of the CPU, such as `znver5`.
    pub cpu: String,
    /// LLVM's feature string, such as `+avx2,+fma`.
    pub features: String,
    /// The C compiler that links, called as `cc -shared -nostdlib`.
    pub linker: PathBuf,
}

impl HostTarget {
    /// The machine this runs on. The linker is `$CC`, or `cc`.
    pub fn native() -> Self {
        let (cpu, features, triple) = llvm::host();
        // Sorted, so that the order does not depend on LLVM's.
        let mut features: Vec<&str> = features.split(',').filter(|f| !f.is_empty()).collect();
        features.sort_unstable();
        let features = features.join(",");
        HostTarget { triple, cpu, features, linker: default_linker() }
    }

    /// A CPU of this machine's architecture by LLVM's name and features, such as
    /// (`x86-64-v3`, `+avx2,+fma,+f16c`).
    pub fn new(cpu: &str, features: &str) -> Self {
        let (_, _, triple) = llvm::host();
        HostTarget { triple, cpu: cpu.into(), features: features.into(), linker: default_linker() }
    }

    /// Whether the CPU has this feature.
    pub fn has(&self, feature: &str) -> bool {
        self.features.split(',').any(|f| f.strip_prefix('+') == Some(feature))
    }

    /// Fails if the target lacks what every kernel needs. Without these LLVM would call into libm.
    pub(crate) fn check(&self) -> Result<(), CodegenError> {
        let needed: &[&str] =
            if self.triple.starts_with("x86_64") { &["avx2", "fma", "f16c"] } else { &[] };
        let missing: Vec<&str> = needed.iter().copied().filter(|f| !self.has(f)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let why = format!("kernels need the CPU features {}", missing.join(", "));
        Err(CodegenError::Target { target: self.cpu.clone(), why })
    }

    /// As LLVM describes it.
    pub(crate) fn llvm(&self) -> Target {
        let HostTarget { triple, cpu, features, .. } = self.clone();
        Target { triple, cpu, features }
    }

    /// Whether vectors of f32 are rounded to bf16 by one instruction.
    pub(crate) fn converts_bf16(&self) -> bool {
        self.has("avx512bf16") && self.has("avx512vl")
    }
}

fn default_linker() -> PathBuf {
    std::env::var_os("CC").filter(|cc| !cc.is_empty()).map_or_else(|| "cc".into(), PathBuf::from)
}

/// Compiles MLIR text to object code; equal text and target give equal bytes.
///
/// # Errors
/// A defect in the text, or an unknown target.
pub(crate) fn object(
    mlir: &Mlir,
    source: &str,
    target: &HostTarget,
) -> Result<Vec<u8>, CodegenError> {
    generate(mlir, source, target, FileType::Object)
}

/// Compiles MLIR text to assembly, as [`object`].
pub(crate) fn assembly(
    mlir: &Mlir,
    source: &str,
    target: &HostTarget,
) -> Result<String, CodegenError> {
    generate(mlir, source, target, FileType::Assembly)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn generate(
    mlir: &Mlir,
    source: &str,
    target: &HostTarget,
    kind: FileType,
) -> Result<Vec<u8>, CodegenError> {
    target.check()?;
    let module = mlir.lower(source)?;
    llvm::emit(mlir, &module, &target.llvm(), kind)
}

/// Links objects into one shared object, in order; equal objects give equal bytes.
///
/// # Errors
/// [`CodegenError::LinkerMissing`], [`CodegenError::Link`] with the linker's output, or an I/O error.
pub(crate) fn link(objects: &[Vec<u8>], linker: &Path) -> Result<Vec<u8>, CodegenError> {
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(linker);
    // Relative names in a temporary folder keep that folder's path out of the output.
    command.current_dir(folder.path()).args(["-shared", "-nostdlib", "-o", "kernels.so"]);
    for (i, object) in objects.iter().enumerate() {
        let name = format!("kernels{i}.o");
        std::fs::write(folder.path().join(&name), object)?;
        command.arg(name);
    }
    let output = command.output().map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => CodegenError::LinkerMissing { linker: linker.into() },
        _ => CodegenError::Link { linker: linker.into(), message: e.to_string() },
    })?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().to_string();
        return Err(CodegenError::Link { linker: linker.into(), message });
    }
    Ok(std::fs::read(folder.path().join("kernels.so"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOUBLE: &str = "
        func.func @double(%x: memref<64xf32>, %begin: i64, %end: i64) {
          %b = arith.index_cast %begin : i64 to index
          %e = arith.index_cast %end : i64 to index
          %s = arith.constant 16 : index
          scf.for %i = %b to %e step %s {
            %v = vector.load %x[%i] : memref<64xf32>, vector<16xf32>
            %w = arith.addf %v, %v : vector<16xf32>
            vector.store %w, %x[%i] : memref<64xf32>, vector<16xf32>
          }
          return
        }";

    #[test]
    fn a_linked_kernel_runs_on_its_range() {
        let target = HostTarget::native();
        let so = link(&[object(&Mlir::new(), DOUBLE, &target).unwrap()], &target.linker).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), so).unwrap();
        let mut x: Vec<f32> = (0..64).map(|i| i as f32).collect();
        // SAFETY: the kernel has this signature and touches 64 elements.
        unsafe {
            let library = libloading::Library::new(file.path()).unwrap();
            let double: libloading::Symbol<unsafe extern "C" fn(*mut f32, i64, i64)> =
                library.get(b"double").unwrap();
            double(x.as_mut_ptr(), 16, 48);
        }
        for (i, x) in x.iter().enumerate() {
            let expected = if (16..48).contains(&i) { 2.0 * i as f32 } else { i as f32 };
            assert_eq!(*x, expected);
        }
    }

    #[test]
    fn equal_sources_give_equal_bytes() {
        let target = HostTarget::native();
        let build =
            || link(&[object(&Mlir::new(), DOUBLE, &target).unwrap()], &target.linker).unwrap();
        assert!(build() == build());
    }

    #[test]
    fn a_missing_linker_has_its_own_error() {
        let error = link(&[], Path::new("/nonexistent/cc")).unwrap_err();
        assert!(matches!(&error, CodegenError::LinkerMissing { .. }), "{error}");
        assert!(error.to_string().contains("/nonexistent/cc"), "{error}");
    }

    #[test]
    fn what_the_linker_says_is_kept() {
        let error = link(&[b"no object".to_vec()], Path::new("cc")).unwrap_err();
        assert!(matches!(&error, CodegenError::Link { message, .. } if !message.is_empty()));
    }

    #[test]
    fn an_operation_without_lowering_is_named() {
        let source = "func.func @f(%x: f32) -> f32 { %y = math.erf %x : f32 return %y : f32 }";
        let error = object(&Mlir::new(), source, &HostTarget::native()).unwrap_err();
        assert!(error.to_string().contains("math.erf"), "{error}");
    }

    #[test]
    fn a_cpu_without_fma_is_refused_by_name() {
        let error = object(&Mlir::new(), DOUBLE, &HostTarget::new("x86-64", "+sse2")).unwrap_err();
        assert!(error.to_string().contains("avx2, fma, f16c"), "{error}");
    }

    #[test]
    fn native_names_a_cpu_and_its_features() {
        let target = HostTarget::native();
        assert!(!target.cpu.is_empty() && target.features.contains('+'), "{target:?}");
        target.check().unwrap();
    }
}
