//! Paths and versions of NVIDIA's libraries on this machine, or why they cannot be used.

use super::cudnn;
use super::error::CudaError;
use super::library::LibraryError;
use super::{cublaslt, nccl, nvrtc};

/// cuBLASLt, for a driver of this version of CUDA.
///
/// # Errors
/// If it cannot be loaded.
pub fn cublaslt(driver: (u32, u32)) -> Result<String, LibraryError> {
    let (path, version) = cublaslt::find(driver)?;
    let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
    Ok(format!("{major}.{minor}.{patch}, {path}"))
}

/// NVRTC, for a driver of this version of CUDA.
///
/// # Errors
/// If it cannot be loaded.
pub fn nvrtc(driver: (u32, u32)) -> Result<String, LibraryError> {
    nvrtc::Nvrtc::open(driver).map(|n| format!("{}.{}, {}", n.version.0, n.version.1, n.path))
}

/// cuDNN, for a driver of this version of CUDA.
///
/// # Errors
/// If it cannot be loaded.
pub fn cudnn(driver: (u32, u32)) -> Result<String, CudaError> {
    let (path, version) = cudnn::find(driver)?;
    Ok(format!("{}.{}.{}, {path}", version / 10_000, version / 100 % 100, version % 100))
}

/// NCCL.
///
/// # Errors
/// If it cannot be loaded.
pub fn nccl() -> Result<String, LibraryError> {
    let library = nccl::Library::open()?;
    let (major, minor, patch) = library.version;
    Ok(format!("{major}.{minor}.{patch}, {}", library.path))
}
