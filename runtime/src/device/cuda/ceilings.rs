//! Measures what a device reaches: the rate of a large bf16 GEMM through cuBLASLt, and the bandwidth of copies within its
//! memory. Predictions and measured steps are compared with these rather than with data sheets.

use frit_cuda::driver::{Address, Driver, EventHandle, GemmAddresses, StreamHandle};
use frit_cuda::{CudaError, GemmProblem};
use frit_ir::DType;
use frit_ir::plan::{Epilogue, Gemm, Matrix, Pointer};
use half::bf16;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;
use std::time::Duration;

/// Timed runs after [`WARM_UP`]; their median counts.
const RUNS: usize = 10;
const WARM_UP: usize = 3;
const WORKSPACE_BYTES: usize = 32 << 20;
/// Bytes of a copy per element of a GEMM's operand: 4 GiB beside a GEMM of 8192³, far more than any cache holds.
const COPIED_BYTES: usize = 64;
const POLL_PAUSE: Duration = Duration::from_micros(20);

type Result<T = ()> = std::result::Result<T, CudaError>;

/// What a device reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ceilings {
    /// Rows, columns and contracted size of the GEMM.
    pub size: usize,
    /// FLOP/s of the fastest algorithm, with random operands in bf16 and sums in f32.
    pub gemm_flops_per_s: f64,
    /// Algorithms that were timed.
    pub algorithms: usize,
    /// Bytes that a copy reads, and writes.
    pub copied_bytes: usize,
    /// Bytes read and written per second.
    pub copy_bytes_per_s: f64,
}

/// Measures GEMMs of this size, and copies of as many bytes as go with it, at most a quarter of the free memory.
///
/// # Errors
/// Too little memory, no algorithm, or a call that failed.
pub(super) fn measure<D: Driver>(driver: &D, size: usize) -> Result<Ceilings> {
    let stopwatch = Stopwatch {
        driver,
        on: driver.create_stream(false)?,
        begin: driver.create_event(true)?,
        end: driver.create_event(true)?,
    };
    let (gemm_us, algorithms) = gemm(&stopwatch, size)?;
    let copied_bytes = (COPIED_BYTES * size * size).min(driver.memory()?.0 / 4);
    let copy_us = copy(&stopwatch, copied_bytes)?;
    let flops = 2.0 * (size as f64).powi(3);
    Ok(Ceilings {
        size,
        gemm_flops_per_s: flops / gemm_us * 1e6,
        algorithms,
        copied_bytes,
        copy_bytes_per_s: 2.0 * copied_bytes as f64 / copy_us * 1e6,
    })
}

/// Microseconds of the fastest algorithm, and how many there are.
fn gemm<D: Driver>(stopwatch: &Stopwatch<'_, D>, size: usize) -> Result<(f64, usize)> {
    let driver = stopwatch.driver;
    let bytes = DType::BF16.size() * size * size;
    let [a, b] = [random(stopwatch, size * size, 0)?, random(stopwatch, size * size, 1)?];
    let (d, workspace) = (allocate(driver, bytes)?, allocate(driver, WORKSPACE_BYTES)?);
    let at = GemmAddresses {
        a,
        b,
        d,
        scales: [0; 2],
        vector: 0,
        matrix: 0,
        workspace: (workspace, WORKSPACE_BYTES),
    };
    let problem = GemmProblem::of(&square(size), &at);
    let algorithms = driver.algorithms(&problem, WORKSPACE_BYTES)?;
    let mut least = f64::INFINITY;
    for algorithm in &algorithms {
        // One that the library cannot make ready after all is passed over.
        let Ok(ready) = driver.prepare(&problem, algorithm) else { continue };
        // SAFETY: the operands and the workspace were allocated with the sizes said, and are freed later.
        let us = stopwatch.median_us(|| unsafe { driver.multiply(ready, at, stopwatch.on) })?;
        least = least.min(us);
    }
    for at in [a, b, d, workspace] {
        driver.free(at)?;
    }
    if least.is_finite() {
        return Ok((least, algorithms.len()));
    }
    let (library, problem) = (driver.properties().libraries.clone(), problem.to_string());
    Err(CudaError::NoAlgorithm { library, problem })
}

fn square(size: usize) -> Gemm {
    let matrix = |at| Matrix {
        at,
        dtype: DType::BF16,
        row_stride: size,
        batch_stride: 0,
        transposed: false,
        scale: None,
    };
    Gemm {
        m: size,
        n: size,
        k: size,
        batch: 1,
        a: matrix(Pointer::Read(0, 0)),
        b: matrix(Pointer::Read(1, 0)),
        d: matrix(Pointer::Write(0, 0)),
        epilogue: Epilogue::None,
    }
}

/// So many random numbers in [-1, 1): with zeros, tensor cores draw less power and run faster than they can in a step.
fn random<D: Driver>(stopwatch: &Stopwatch<'_, D>, n: usize, seed: u64) -> Result<Address> {
    let driver = stopwatch.driver;
    let mut bytes = vec![0; n * size_of::<u16>()];
    let at = allocate(driver, bytes.len())?;
    ChaCha12Rng::seed_from_u64(seed).fill_bytes(&mut bytes);
    for pair in bytes.as_chunks_mut::<2>().0 {
        let number = bf16::from_f32(f32::from(i16::from_le_bytes(*pair)) / 32768.0);
        *pair = number.to_le_bytes();
    }
    // SAFETY: the bytes live until the copy was made.
    unsafe { driver.copy_in(at, bytes.as_ptr(), bytes.len(), stopwatch.on)? };
    driver.record(stopwatch.end, stopwatch.on)?;
    stopwatch.wait()?;
    Ok(at)
}

/// Device memory, or an error that speaks of no plan.
fn allocate(driver: &impl Driver, bytes: usize) -> Result<Address> {
    driver.allocate(bytes).map_err(|e| match e {
        CudaError::OutOfMemory { wanted, free, .. } => {
            let reason = format!(
                "{wanted} bytes of GPU memory are needed, {free} are free; measure a smaller GEMM"
            );
            CudaError::Call { call: "a measurement", reason }
        }
        other => other,
    })
}

/// Microseconds of a copy of so many bytes.
fn copy<D: Driver>(stopwatch: &Stopwatch<'_, D>, bytes: usize) -> Result<f64> {
    let driver = stopwatch.driver;
    let [from, to] = [allocate(driver, bytes)?, allocate(driver, bytes)?];
    driver.zero(from, bytes, stopwatch.on)?;
    let us = stopwatch.median_us(|| driver.copy(to, from, bytes, stopwatch.on))?;
    driver.free(from)?;
    driver.free(to)?;
    Ok(us)
}

/// Times what is put on a stream.
struct Stopwatch<'a, D> {
    driver: &'a D,
    on: StreamHandle,
    begin: EventHandle,
    end: EventHandle,
}

impl<D: Driver> Stopwatch<'_, D> {
    fn median_us(&self, work: impl Fn() -> Result) -> Result<f64> {
        let mut times = Vec::with_capacity(RUNS);
        for run in 0..WARM_UP + RUNS {
            self.driver.record(self.begin, self.on)?;
            work()?;
            self.driver.record(self.end, self.on)?;
            self.wait()?;
            if run >= WARM_UP {
                times.push(self.driver.elapsed_us(self.begin, self.end)?);
            }
        }
        times.sort_by(f64::total_cmp);
        Ok(times[RUNS / 2])
    }

    fn wait(&self) -> Result {
        while !self.driver.reached(self.end)? {
            std::thread::sleep(POLL_PAUSE);
        }
        Ok(())
    }
}
