"""The next start of a run after an end: a new step of the job, a requeue, or a follow-up job."""
