//! The CUDA target: compiles MLIR text with `nvvm` operations to PTX text.
//!
//! No CUDA toolkit is needed. PTX 8.0 runs on every driver of CUDA 12 and later; that of Blackwell is 8.7, for which a driver of
//! CUDA 12.8 or later is needed.
//! Source: PTX ISA, "Release Notes" (PTX ISA versions, CUDA releases and target architectures).

use crate::error::CodegenError;
use crate::llvm::{self, FileType, Target};
use crate::mlir::Mlir;

/// A chip such as `sm_90`, as LLVM describes it.
///
/// # Errors
/// An unknown chip.
pub(crate) fn target(chip: &str) -> Result<Target, CodegenError> {
    let known = chip.strip_prefix("sm_").and_then(|n| n.trim_end_matches('a').parse::<u32>().ok());
    let version = match known {
        Some(80..100) => "+ptx80",
        Some(100..=120) => "+ptx87",
        _ => {
            let why = "kernels are generated for sm_80 to sm_120".into();
            return Err(CodegenError::Target { target: chip.into(), why });
        }
    };
    Ok(Target { triple: "nvptx64-nvidia-cuda".into(), cpu: chip.into(), features: version.into() })
}

/// Compiles MLIR text to PTX. Every function is a kernel; `blocks` has its name and threads per block.
///
/// # Errors
/// A defect in the text.
pub(crate) fn ptx(
    mlir: &Mlir,
    source: &str,
    blocks: &[(String, u32)],
    target: &Target,
) -> Result<Vec<u8>, CodegenError> {
    let module = mlir.lower(source)?;
    mlir.mark_kernels(&module, blocks);
    let mut text = llvm::emit(mlir, &module, target, FileType::Assembly)?;
    text.truncate(text.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
    Ok(text)
}

/// The end of a PTX module's head.
const HEAD_END: &str = ".address_size 64\n";

/// One module of several that were compiled for the same chip. Names must be distinct.
pub(crate) fn join(texts: &[String]) -> String {
    let mut all = String::new();
    for text in texts {
        match text.split_once(HEAD_END) {
            Some((_, kernels)) if !all.is_empty() => all.push_str(kernels),
            _ => all.push_str(text),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: &str = "
        func.func @copy(%x: memref<1024xf32>, %y: memref<1024xf32>) {
          %t = nvvm.read.ptx.sreg.tid.x : i32
          %i = arith.index_cast %t : i32 to index
          %c4 = arith.constant 4 : index
          %j = arith.muli %i, %c4 : index
          %v = vector.load %x[%j] {alignment = 16 : i64} : memref<1024xf32>, vector<4xf32>
          vector.store %v, %y[%j] {alignment = 16 : i64} : memref<1024xf32>, vector<4xf32>
          return
        }";

    #[test]
    fn kernels_use_wide_accesses_and_declare_their_block() {
        let target = target("sm_90").unwrap();
        let text = ptx(&Mlir::new(), COPY, &[("copy".into(), 256)], &target).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains(".version 8.0") && text.contains(".target sm_90"), "{text}");
        assert!(text.contains(".visible .entry copy("), "{text}");
        assert!(text.contains(".maxntid 256"), "{text}");
        assert!(text.contains("ld.global") && text.contains(".v4."), "{text}");
    }

    #[test]
    fn an_unknown_chip_is_refused_by_name() {
        let error = target("sm_12345").unwrap_err();
        assert!(error.to_string().contains("sm_12345"), "{error}");
    }
}
