//! Which algorithm each matrix product uses: measured once on this GPU, and kept in `tuning.json` beside the
//! plan for the same GPU and libraries. Rank 0 chooses, so that all ranks compute alike.

use super::driver::{
    Algorithm, Driver, EventHandle, ProductAddresses, ProductHandle, StreamHandle,
};
use super::error::CudaError;
use super::gemm::Product;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Measured runs of each algorithm; the fastest counts.
const RUNS: usize = 5;

/// The content of `tuning.json`: by GPU and library versions, the algorithm of each product; none for one of
/// which the library has not the epilogue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tuning(BTreeMap<String, BTreeMap<String, Option<Algorithm>>>);

impl Tuning {
    /// Reads a file; nothing is known if there is none, or if it is not one.
    pub(super) fn read(path: &Path) -> Tuning {
        let text = std::fs::read(path).unwrap_or_default();
        Tuning::parse(&text).unwrap_or_default()
    }

    /// Reads its text.
    pub(super) fn parse(text: &[u8]) -> Option<Tuning> {
        serde_json::from_slice(text).ok()
    }

    /// Its text.
    pub(super) fn text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// Writes a file, whole or not at all. A plan directory that cannot be written is measured again.
    pub(super) fn write(&self, path: &Path) {
        let aside = path.with_extension(format!("partial-{}", std::process::id()));
        let written =
            std::fs::write(&aside, self.text()).and_then(|()| std::fs::rename(&aside, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&aside);
        }
    }

    /// The algorithm of a product on this device.
    fn get(&self, device: &str, product: &Product) -> Option<&Option<Algorithm>> {
        self.0.get(device)?.get(&product.to_string())
    }

    /// Measures the products whose algorithm is not known, on the addresses of their first task. Returns
    /// whether there were any.
    ///
    /// # Errors
    /// A product that no algorithm computes, or a call that failed.
    pub(super) fn measure(
        &mut self,
        driver: &impl Driver,
        products: &[(Product, ProductAddresses)],
        on: StreamHandle,
        wait: impl Fn(EventHandle) -> Result<(), crate::RunError>,
    ) -> Result<bool, crate::RunError> {
        let device = device(driver);
        let events = [driver.create_event(true)?, driver.create_event(true)?];
        let mut changed = false;
        for (product, at) in products {
            if self.get(&device, product).is_some() {
                continue;
            }
            let mut best: Option<(f64, Algorithm)> = None;
            let algorithms = match driver.algorithms(product, at.workspace.1) {
                Err(CudaError::NoAlgorithm { .. }) if product.epilogue.is_optional() => vec![],
                algorithms => algorithms?,
            };
            for algorithm in algorithms {
                let handle = driver.prepare(product, &algorithm)?;
                // One run to load it, then the measured ones.
                for run in 0..=RUNS {
                    driver.record(events[0], on)?;
                    // SAFETY: the addresses are those of a task of the plan, which is not running.
                    unsafe { driver.multiply(handle, *at, on)? };
                    driver.record(events[1], on)?;
                    wait(events[1])?;
                    let us = driver.elapsed_us(events[0], events[1])?;
                    if run > 0 && best.is_none_or(|(least, _)| us < least) {
                        best = Some((us, algorithm));
                    }
                }
            }
            let algorithm = best.map(|(_, algorithm)| algorithm);
            if algorithm.is_none() && !product.epilogue.is_optional() {
                let library = driver.properties().libraries.clone();
                let product = product.to_string();
                return Err(CudaError::NoAlgorithm { library, product }.into());
            }
            self.0.entry(device.clone()).or_default().insert(product.to_string(), algorithm);
            changed = true;
        }
        Ok(changed)
    }

    /// Makes every product that has an algorithm ready with it.
    ///
    /// # Errors
    /// A product that was not measured, or that the library refuses.
    pub(super) fn prepare(
        &self,
        driver: &impl Driver,
        products: &[(Product, ProductAddresses)],
    ) -> Result<Vec<Option<ProductHandle>>, CudaError> {
        let device = device(driver);
        let prepare = |(product, _): &(Product, ProductAddresses)| {
            let algorithm = self.get(&device, product).ok_or_else(|| CudaError::NoAlgorithm {
                library: format!("rank 0's choice for another device than {device}"),
                product: product.to_string(),
            })?;
            algorithm.as_ref().map(|algorithm| driver.prepare(product, algorithm)).transpose()
        };
        products.iter().map(prepare).collect()
    }
}

/// What a choice is valid for.
fn device(driver: &impl Driver) -> String {
    let p = driver.properties();
    format!("{} sm_{}{}, {}", p.name, p.capability.0, p.capability.1, p.libraries)
}
