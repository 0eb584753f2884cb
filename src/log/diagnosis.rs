//! A diagnosis in TensorBoard: one point a step.

use serde::Serialize;

use super::collapse::{Heatmap, Plane};
use super::directory::RunDirectory;
use super::events::EventWriter;
use crate::diagnostics::{History, StepRecord};
use crate::error::Result;

/// Writes the steps of a diagnosis as they are finished.
pub struct DiagnosisLog {
    events: EventWriter,
    low: f64,
}

impl DiagnosisLog {
    /// Starts the event file with the resolved configuration as text; `low` is the share of the baseline
    /// below which a number is low.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn create(directory: &RunDirectory, config: &str, low: f64) -> Result<Self> {
        Ok(Self { events: EventWriter::of_run(directory, config)?, low })
    }

    /// Writes one step, the last of the history.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn step(&mut self, record: &StepRecord, history: &History) -> Result<()> {
        write_diagnosis(&mut self.events, record, history, self.low)
    }
}

/// Writes a diagnosed step, the last of the history; `low` is the share of the baseline below which a
/// number is low.
pub(super) fn write_diagnosis(
    events: &mut EventWriter,
    record: &StepRecord,
    history: &History,
    low: f64,
) -> Result<()> {
    let step = record.step;
    for (name, value) in scalars(record) {
        events.scalar(&format!("collapse/{name}"), step, value)?;
    }
    if !record.rows.is_empty() {
        let matrix = Heatmap { rows: &record.rows };
        events.image("collapse/scores", step, &matrix.draw())?;
    }
    if history.measured().next().is_some() {
        let plane = Plane { history, baseline: record.judgement.baseline, low };
        events.image("collapse/plane", step, &plane.draw())?;
    }
    events.flush()
}

/// Every number of a step: metrics under the names by which they are written as JSON.
fn scalars(record: &StepRecord) -> Vec<(String, f64)> {
    let mut scalars = numbers(&record.metrics);
    scalars.extend(numbers(&record.judgement));
    scalars.extend(numbers(&record.spans));
    scalars.push(("valid_share".into(), record.valid_share));
    scalars.push(("contexts".into(), record.cost.contexts as f64));
    scalars.extend(record.old_logprobs_gap.map(|gap| ("old_logprobs_gap".to_owned(), gap)));
    scalars
}

/// The numbers of a record, and its flags as 0 and 1.
fn numbers(record: &impl Serialize) -> Vec<(String, f64)> {
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(record) else {
        return Vec::new();
    };
    let number = |value: &serde_json::Value| {
        value.as_f64().or_else(|| value.as_bool().map(|flag| f64::from(u8::from(flag))))
    };
    fields.iter().filter_map(|(name, value)| Some((name.clone(), number(value)?))).collect()
}
