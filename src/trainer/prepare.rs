//! What a run begins with, from a configuration or from a checkpoint.

use std::path::{Path, PathBuf};

use super::checkpoint::{Checkpoint, CheckpointStore, Content};
use super::record::TrainReport;
use super::run::Trainer;
use super::source::Source;
use super::state::{self, State};
use super::text::TextSource;
use super::{AdamW, Critic, Optimizer};
use crate::config::{CheckpointConfig, Checkpoints, Config, OptimizerConfig, TrainSections};
use crate::diagnostics::Examiner;
use crate::error::{Error, Result};
use crate::filter::StepFilter;
use crate::gradient::Engine;
use crate::objective::{AdvantageEstimator, Algorithm, KlEstimator, KlGradient};
use crate::policy::{Policy, PolicyKind, PolicyOptions};
use crate::trainer::Keep;

/// What a run works with.
pub(super) struct Parts {
    pub policy: Policy,
    pub reference: Option<Policy>,
    pub critic: Option<Critic>,
    pub optimizer: Optimizer,
    pub source: Box<dyn Source>,
    /// Of validations, if they have an environment of their own.
    pub validation: Option<Box<dyn Source>>,
    pub filter: StepFilter,
    pub engine: Option<Box<dyn Engine>>,
    pub examiner: Option<Examiner>,
}

impl Trainer {
    /// A run in the environment that the configuration names. With a checkpoint it goes on from there.
    /// Seeds libtorch's random generators.
    ///
    /// # Errors
    /// At the first thing that is wrong with the configuration, the policies or the checkpoint.
    pub fn prepare(config: Config, checkpoint: Option<&Checkpoint>) -> Result<Self> {
        let config = config.resolve_training()?;
        let sections = config.train_sections();
        sections.check_text(&config)?;
        let temperature = config.policy.temperature;
        let source = |environment| -> Result<Box<dyn Source>> {
            Ok(Box::new(TextSource::new(environment, &sections.sampling, temperature)?))
        };
        let Some(environment) = &sections.environment else {
            return Err(Error::config("environment", "expected an environment, found none"));
        };
        let validation = sections.validation.environment.as_ref().map(source).transpose()?;
        Self::build(config.clone(), source(environment)?, validation, checkpoint)
    }

    /// A run on trajectories of a source of one's own; the configuration needs no environment.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn with_source(
        config: Config,
        source: Box<dyn Source>,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Self> {
        Self::build(config.resolve_training()?, source, None, checkpoint)
    }

    fn build(
        config: Config,
        source: Box<dyn Source>,
        validation: Option<Box<dyn Source>>,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Self> {
        let sections = config.train_sections();
        let algorithm = config.algorithm()?;
        let options = PolicyOptions {
            observation_shape: source.observation_shape(),
            ..config.policy_options(config.device.resolve()?)?
        };
        let loader = Loader { config: &config, sections: &sections, options, checkpoint };
        let mut state = checkpoint.map(state::read_state).transpose()?.unwrap_or_default();
        let policy = loader.policy()?;
        let mut parts = Parts {
            reference: loader.reference(&algorithm, &mut state, &policy)?,
            critic: loader.critic(&algorithm)?,
            optimizer: loader.optimizer(&policy, &sections.optimizer)?,
            source,
            validation,
            filter: config.filter.step_filter(),
            engine: None,
            examiner: (config.policy.kind == PolicyKind::CausalLm)
                .then(|| Examiner::new(&config.diagnostics, config.policy.temperature))
                .transpose()?,
            policy,
        };
        // libtorch's own generators begin anywhere; a policy may draw from them.
        tch::manual_seed(sections.training.seed as i64);
        if let Some(checkpoint) = checkpoint {
            let device = parts.policy.device();
            state::restore(checkpoint, &mut parts.optimizer, parts.critic.as_mut(), device)?;
            if let (Some(examiner), Some(history)) = (&mut parts.examiner, &state.history) {
                examiner.restore(history.clone());
            }
        }
        let report =
            TrainReport { warnings: early_warnings(&algorithm, &parts), ..TrainReport::default() };
        let mut trainer = Self { config, sections, algorithm, parts, state, store: None, report };
        trainer.drop_foreign_groups();
        Ok(trainer)
    }

    /// Saves to a folder from now on, as section `checkpoint` says.
    ///
    /// # Errors
    /// If it cannot be made or written.
    pub fn save_to(&mut self, folder: &Path) -> Result<()> {
        let CheckpointConfig { keep, best, .. } = self.sections.checkpoint;
        self.store = Some(CheckpointStore::open(folder, Keep { last: keep, best })?);
        Ok(())
    }
}

/// Loads what a run needs, from the files that are named or from a checkpoint.
struct Loader<'a> {
    config: &'a Config,
    sections: &'a TrainSections,
    options: PolicyOptions,
    checkpoint: Option<&'a Checkpoint>,
}

impl Loader<'_> {
    fn initial(&self) -> Result<PathBuf> {
        match &self.config.policy.checkpoint {
            Some(Checkpoints::One(path)) => Ok(path.clone()),
            Some(Checkpoints::List(_)) => Err(Error::config(
                "policy.checkpoint",
                "expected the one file that training begins with, found a list",
            )),
            None => Err(Error::config(
                "policy.checkpoint",
                "expected the TorchScript file that training begins with, found none",
            )),
        }
    }

    fn policy(&self) -> Result<Policy> {
        let path = match self.checkpoint {
            Some(checkpoint) => checkpoint.file(state::POLICY)?,
            None => self.initial()?,
        };
        Policy::load(&path, &self.options)
    }

    /// The reference policy, if the loss has a KL term or one is asked for: the file that is named, else
    /// the initial weights; or what it was last refreshed to. A run keeps to one file.
    fn reference(
        &self,
        algorithm: &Algorithm,
        state: &mut State,
        policy: &Policy,
    ) -> Result<Option<Policy>> {
        let refreshes = self.sections.training.refresh_reference.is_some();
        let named = &self.config.policy.reference;
        if algorithm.kl.coef == 0.0 && named.is_none() && !refreshes {
            return Ok(None);
        }
        let path = match (self.checkpoint, named) {
            (Some(checkpoint), _) if state.refreshed => checkpoint.file(state::REFERENCE)?,
            (_, Some(path)) => path.clone(),
            (_, None) => self.initial()?,
        };
        if !state.refreshed {
            let found = Content::of(&path).map_err(Error::io("read", &path))?;
            if *state.reference.get_or_insert(found) != found {
                return Err(Error::checkpoint(
                    &path,
                    "expected the reference policy that the run began with, found another file; put that one back (policy.reference names it, or else policy.checkpoint), or begin a new run",
                ));
            }
        }
        let reference = Policy::load_without_gradient(&path, &self.options)?;
        if reference.choices() != policy.choices() {
            return Err(Error::checkpoint(
                &path,
                format!(
                    "expected a reference policy of the {} choices that the policy has, found {}",
                    policy.choices(),
                    reference.choices()
                ),
            ));
        }
        Ok(Some(reference))
    }

    fn critic(&self, algorithm: &Algorithm) -> Result<Option<Critic>> {
        let section = &self.sections.critic;
        let Some(initial) = &section.checkpoint else {
            if algorithm.advantage == AdvantageEstimator::Gae && self.sections.environment.is_some()
            {
                return Err(Error::config(
                    "critic.checkpoint",
                    "expected a TorchScript value model, since the advantage is gae, found none",
                ));
            }
            return Ok(None);
        };
        if algorithm.advantage != AdvantageEstimator::Gae {
            return Err(Error::config(
                "critic.checkpoint",
                "expected none, since only the advantage gae reads values; leave it out",
            ));
        }
        let path = match self.checkpoint {
            Some(checkpoint) => checkpoint.file(state::CRITIC)?,
            None => initial.clone(),
        };
        // The policy's choice of trainable parameters is not the critic's.
        let options =
            PolicyOptions { trainable: PolicyOptions::default().trainable, ..self.options.clone() };
        let model = Policy::load(&path, &options)?;
        let optimizer = self.optimizer(&model, &section.optimizer)?;
        let budget = self.sections.training.token_budget;
        Critic::new(model, optimizer, section.clip(), budget).map(Some)
    }

    fn optimizer(&self, policy: &Policy, section: &OptimizerConfig) -> Result<Optimizer> {
        let adamw = AdamW::of_policy(section.adamw(), policy)?;
        let failures = self.sections.training.failed_updates;
        Optimizer::new(adamw, section.schedule(), section.max_norm(), failures)
    }
}

/// What is odd before anything is sampled.
fn early_warnings(algorithm: &Algorithm, parts: &Parts) -> Vec<String> {
    let models =
        [Some(&parts.policy), parts.reference.as_ref(), parts.critic.as_ref().map(Critic::model)];
    let mut warnings: Vec<String> =
        models.into_iter().flatten().flat_map(Policy::warnings).cloned().collect();
    let ignores_reference =
        algorithm.kl.estimator == KlEstimator::K1 && algorithm.kl.gradient == KlGradient::Own;
    if ignores_reference && algorithm.kl_loss_coef() > 0.0 {
        warnings.push(crate::study::K1_WARNING.into());
    }
    warnings
}
