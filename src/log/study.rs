//! A study in TensorBoard: one point a step.

use super::directory::RunDirectory;
use super::events::EventWriter;
use super::picture::{Mark, Scatter};
use crate::error::Result;
use crate::study::{BatchRecord, SIGNIFICANT};

/// Writes the steps of a study as they are finished.
pub struct StudyLog {
    events: EventWriter,
}

impl StudyLog {
    /// Starts the event file with the resolved configuration as text.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn create(directory: &RunDirectory, config: &str) -> Result<Self> {
        Ok(Self { events: EventWriter::of_run(directory, config)? })
    }

    /// Writes one step.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn step(&mut self, record: &BatchRecord) -> Result<()> {
        for (tag, value) in batch_scalars(record) {
            self.events.scalar(tag, record.step, value)?;
        }
        write_split(&mut self.events, record)
    }
}

/// Writes the split of a batch's gradients: numbers, histograms and a picture.
pub(super) fn write_split(events: &mut EventWriter, record: &BatchRecord) -> Result<()> {
    let step = record.step;
    for (tag, value) in split_scalars(record) {
        events.scalar(&tag, step, value)?;
    }
    let of = |value: fn(&crate::study::GroupRecord) -> f64| {
        record.groups.iter().map(value).collect::<Vec<f64>>()
    };
    events.histogram("snr/histogram", step, &of(|group| group.split.snr))?;
    events.histogram("reward/variance_histogram", step, &of(|group| group.reward_variance))?;
    let marks: Vec<Mark> = record
        .groups
        .iter()
        .map(|group| Mark {
            x: group.reward_variance,
            y: group.split.snr,
            strong: group.split.signal_p.is_some_and(|p| p <= SIGNIFICANT),
            filled: group.kept,
        })
        .collect();
    let picture = Scatter {
        title: "Signal-to-noise ratio by reward variance",
        legend: "red: significant signal (p <= 0.05)   filled: kept by the filter",
        x_label: "reward variance",
        y_label: "SNR",
        marks: &marks,
    };
    events.image("snr/by_reward_variance", step, &picture.draw())?;
    events.flush()
}

/// The numbers of the split under their tags.
fn split_scalars(record: &BatchRecord) -> Vec<(String, Option<f64>)> {
    let mut scalars: Vec<(String, Option<f64>)> = Vec::new();
    let mut put = |tag: &str, value: Option<f64>| scalars.push((tag.to_owned(), value));
    put("snr/mean", record.snr_mean);
    put("snr/median", record.snr_median);
    put("snr/significant_share", Some(record.significant_share));
    put("snr/dominance_mean", record.dominance_mean);
    put("snr/spearman_rv", record.spearman_rv_snr);
    put("snr/spearman_rv_signal", record.spearman_rv_signal);
    put("snr/task_coherence", record.task_coherence);
    put("snr/reg_coherence", record.reg_coherence);
    if let Some(signal) = &record.signal {
        put("snr/batch", Some(signal.snr));
        put("snr/gradient_noise_scale", signal.gradient_noise_scale);
        put("grad_norm/signal", Some(signal.signal_sq.max(0.0).sqrt()));
        put("grad_norm/noise", Some(signal.noise_sq.max(0.0).sqrt()));
    }
    if let Some(norms) = &record.grad_norm {
        put("grad_norm/task", Some(norms.task));
        put("grad_norm/kl", norms.kl);
        put("grad_norm/entropy", norms.entropy);
        put("grad_norm/reg", Some(norms.reg));
        put("grad_norm/total", Some(norms.total));
        put("cos/task_reg", norms.cos_task_reg);
        put("cos/kl_entropy", norms.cos_kl_entropy);
        put("cos/task_total", norms.cos_task_total);
    }
    for bucket in &record.buckets {
        let (mean, norms) = (&bucket.norm_of_mean, &bucket.mean_of_norms);
        let parts = [
            ("task", Some(mean.task), Some(norms.task)),
            ("kl", mean.kl, norms.kl),
            ("entropy", mean.entropy, norms.entropy),
            ("reg", Some(mean.reg), Some(norms.reg)),
            ("total", Some(mean.total), Some(norms.total)),
        ];
        let prefix = format!("grad_norm_bucket/{}", bucket.bucket + 1);
        for (name, of_mean, of_norms) in parts {
            put(&format!("{prefix}/{name}"), of_mean);
            put(&format!("{prefix}/{name}_mean_of_norms"), of_norms);
        }
        put(&format!("{prefix}/groups"), Some(bucket.groups as f64));
        put(&format!("{prefix}/snr_mean"), Some(bucket.snr_mean));
        put(&format!("{prefix}/reward_variance_max"), Some(bucket.reward_variance_max));
    }
    scalars
}

/// What is known of a batch beside the split, under its tags.
fn batch_scalars(record: &BatchRecord) -> Vec<(&'static str, Option<f64>)> {
    let mut scalars = super::filter::scalars(&record.kept).to_vec();
    scalars.extend([
        ("reward/mean", Some(record.reward_mean)),
        ("reward/variance_mean", Some(record.reward_variance_mean)),
        ("reward/all_zero_share", Some(record.all_zero_share)),
        ("reward/all_equal_share", Some(record.all_equal_share)),
        ("loss/entropy", Some(record.entropy_mean)),
        ("loss/kl", record.kl_mean),
        ("loss/approx_kl", Some(record.ratio.approx_kl)),
        ("loss/clip_fraction", Some(record.ratio.clip_fraction)),
        ("loss/ratio_mean", Some(record.ratio.mean)),
        ("loss/ratio_max", Some(record.ratio.max)),
        ("loss/effective_sample_size", Some(record.ratio.effective_sample_size)),
        ("perf/length_mean", Some(record.length_mean)),
        ("perf/tokens", Some(record.tokens as f64)),
    ]);
    scalars
}
